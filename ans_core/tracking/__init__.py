"""SAM2's video memory: clips with masks and simulated prompts in, a SAM2 that follows objects better out."""
