"""Folders that serving engines load: a writer for each layout, and the scheme and the card that they share."""
