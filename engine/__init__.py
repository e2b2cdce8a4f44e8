"""What trains, and what it reads and writes."""
