//! All that turns text into tokens and back: what a gateway needs of a model it holds no weights of.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// A tokenizer, a chat template and the special tokens, self-contained. Named by [`TokenizerBundle::digest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenizerBundle {
    /// A Hugging Face `tokenizer.json`.
    pub tokenizer_json: String,
    /// A Jinja chat template; `None` for base models, whose chat requests are refused.
    pub chat_template: Option<String>,
    /// Text of the begin-of-sequence token, if there is one.
    pub bos_token: Option<String>,
    /// Text of the end-of-sequence token, if there is one.
    pub eos_token: Option<String>,
    /// Put the begin-of-sequence token before a raw completion prompt.
    pub add_bos: bool,
}

impl TokenizerBundle {
    /// sha256 over all fields, hex.
    #[must_use]
    pub fn digest(&self) -> String {
        let mut hasher = Sha256::new();
        let option = |text: &Option<String>| text.clone().map_or_else(|| "-".to_owned(), |t| format!("+{t}"));
        let parts =
            [&self.tokenizer_json, &option(&self.chat_template), &option(&self.bos_token), &option(&self.eos_token)];
        for part in parts {
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        hasher.update([u8::from(self.add_bos)]);
        hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}
