"""The runner: run folder, journal, child processes and the executor. It never imports torch."""
