"""The `kvpp` command: plan, check, doctor, demo, bench."""
