"""The tests of kvpp_core, the connectors and the engine integration."""
