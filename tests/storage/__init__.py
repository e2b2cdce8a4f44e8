"""Tests against a real HDFS and a real S3 server, which `make test-storage` installs and starts."""
