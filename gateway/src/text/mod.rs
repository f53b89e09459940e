//! From tokens to the text a client reads. Pure: no I/O, no clock, no randomness.
//!
//! One rule holds for everything here: cut the same tokens into frames in any way, and the text, the
//! log-probabilities, the finish reasons and the counts come out the same.

pub mod choice;
pub mod detokenize;
pub mod fold;
pub mod stop;
pub mod table;
pub mod usage;

pub use choice::{ChoiceText, Finish, Piece, TextRules, TokenEntry};
pub use detokenize::Detokenizer;
pub use fold::{Answer, Answers, FrameFault, Transcript};
pub use table::Decoding;
pub use usage::Usage;
