"""The series on other releases: resolutions and worked logs, and the test that rebuilds them."""
