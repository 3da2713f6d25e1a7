"""Stands in for SGLang where only its outside matters: flags, log, HTTP answers, processes."""
