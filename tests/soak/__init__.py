"""Random traffic for minutes: KVPP on against KVPP off, and nothing left behind."""
