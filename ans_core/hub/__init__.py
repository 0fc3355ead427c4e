"""Data sets, bases and models of the Hugging Face hub: fetched, pulled, and sent with a model card."""
