"""A model and what it is asked in; texts and masks out."""
