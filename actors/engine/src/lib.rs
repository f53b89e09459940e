//! The engine contract and the engines behind it.
