"""The page of `ans demo`: what it computes (without gradio), and the page itself (page.py, the only module
that imports gradio)."""
