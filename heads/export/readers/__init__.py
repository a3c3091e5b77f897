"""Each layout as its engine reads it: the loading rules and the forward, written a second time, from the engine's source."""
