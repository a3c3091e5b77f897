"""What a recipe would do, and how long it would take."""
