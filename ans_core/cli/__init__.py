"""`ans`: a file a command, with its words (`add_arguments`) and what it does (`run`). Each imports what it
needs when it runs."""
