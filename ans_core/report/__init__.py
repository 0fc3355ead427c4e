"""The report: what the stages wrote -> one self-contained page, and the headline that git keeps."""
