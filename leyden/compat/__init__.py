"""What exists because another library is named so."""
