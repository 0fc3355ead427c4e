"""An agent that looks again before it answers: visual operations as tools, the protocol that calls them, and
a drawn world of questions."""
