"""The served truth: what was measured, and whether the draft should be deployed."""
