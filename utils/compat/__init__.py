"""What is used of other libraries without their promise to keep it; `holdfast.engine.compat` has that of the engine."""
