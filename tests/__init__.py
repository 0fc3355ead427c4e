SHARED = "ANS_TESTS_SHARED"
"""Names, in the environment, a folder that all processes of one pytest run share; it goes when the run
ends."""
RUNS = "runs"
"""A file in it that is locked as long as the run goes on."""
