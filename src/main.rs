//! The `starling` binary.
fn main() {}
