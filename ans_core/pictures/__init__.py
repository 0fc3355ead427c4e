"""Pictures and clips: read upright, transformed, drawn on, and their masks in run-length encoding. Loads
nothing by itself."""
