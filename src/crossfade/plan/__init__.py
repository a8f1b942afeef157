"""What each actor will do, as a value: actions, text form, validator, timeline."""
