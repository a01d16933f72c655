"""Programs to run and to read. A package, so that tests can import what they show."""
