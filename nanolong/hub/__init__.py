"""Other programs' formats: import and export of models and tokenizers."""
