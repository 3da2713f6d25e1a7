"""The target served by SGLang: launched, watched, asked, and made to give out its hidden states."""
