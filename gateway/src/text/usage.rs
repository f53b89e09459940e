//! What a request is charged for.

/// Token counts of one HTTP request, all its prompts and choices together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens in the prompts, each prompt once however many choices it has.
    pub prompt_tokens: u64,
    /// Of these, taken from a prefix cache instead of being computed.
    pub cached_tokens: u64,
    /// Tokens of the answers, the one that ended each included.
    pub completion_tokens: u64,
}

impl Usage {
    /// Prompt and answers.
    #[must_use]
    pub fn total_tokens(&self) -> u64 {
        self.prompt_tokens + self.completion_tokens
    }
}
