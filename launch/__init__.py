"""From a recipe to its stages: schema, command line, run folder, processes."""
