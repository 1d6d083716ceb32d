"""What each adapter format does on each kind of base: measured against PEFT, written as a table."""
