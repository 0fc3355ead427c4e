SHARED = "ANS_TESTS_SHARED"
"""Names, in the environment, a folder that all processes of one pytest run share; it goes when the run ends."""
