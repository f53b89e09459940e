//! An engine in a process of its own, fronted: vLLM, SGLang, llama.cpp, or any server that completes text over HTTP.
//!
//! Prompts go out as tokens and answers come back as tokens (`dialect`), so that routers' block hashes are exact and an answer
//! that broke goes on elsewhere. One thread with a small runtime has the sockets (`io`, `call`, `http`), looks after the server's
//! health and load (`health`, `gauges`) and listens to its KV events (`events`, `zmtp`). The [`Engine`] that a worker steps
//! (`engine`) never waits for any of that. Called by the node that starts workers.
//! Never: moves KV blocks; the server keeps its own, so splits, pulls and moves with blocks are not for such a worker.
//! Bounds: see [`ServerOptions`] and the constants of each file. If the server goes: its sequences end with a typed fault, the
//! worker says that it is away, and its blocks are forgotten.

mod call;
mod dialect;
mod engine;
mod events;
mod flight;
mod gauges;
mod health;
mod http;
mod inventory;
mod io;
mod sse;
#[cfg(test)]
mod tests;
mod words;
mod zmtp;

use std::{fmt, path::PathBuf, str::FromStr, sync::Arc};

use starling_kv::hash::{HashSeed, SeedParts};

use self::{engine::SidecarEngine, http::Server, words::Words};
use crate::{
    bundle::TokenizerBundle,
    contract::{Capabilities, Engine, EngineLimits, ModelCard},
    embedded,
    loader::{LoadError, LoadedModel, ModelOptions},
};

pub use events::{Endpoint, EndpointError};
pub use http::UrlError;

/// Tokens of our blocks; the server's own may be any multiple or part of that.
const BLOCK_TOKENS: u32 = 16;

/// What the server speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// vLLM: `/v1/completions` with token ids both ways.
    Vllm,
    /// SGLang: `/generate` with token ids both ways.
    Sglang,
    /// llama.cpp's server: `/completion` with token ids both ways, but for characters that are written in several tokens.
    LlamaCpp,
    /// Any server with `/v1/completions`: text both ways, so tokens are those of the model's own tokenizer.
    OpenAi,
}

impl Dialect {
    /// The word for it, as in the settings.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::LlamaCpp => "llama.cpp",
            Self::OpenAi => "openai",
        }
    }

    /// Whether such a server can publish its KV events.
    #[must_use]
    pub const fn has_events(self) -> bool {
        matches!(self, Self::Vllm | Self::Sglang)
    }
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

impl FromStr for Dialect {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Self::Vllm, Self::Sglang, Self::LlamaCpp, Self::OpenAi];
        all.into_iter().find(|dialect| dialect.label() == text).ok_or_else(|| format!("{text:?} is no dialect"))
    }
}

/// The address of a server: `http://HOST:PORT`, perhaps with a path before its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerUrl(http::Place);

impl FromStr for ServerUrl {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        http::Place::read(text).map(Self)
    }
}

impl fmt::Display for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Which server, and how to reach it.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// What it speaks.
    pub dialect: Dialect,
    /// Its HTTP server.
    pub url: ServerUrl,
    /// Where it publishes its KV events; `None` when it does not, or nobody shall listen.
    pub events: Option<Endpoint>,
    /// Where it sends events again that were lost on the way.
    pub replay: Option<Endpoint>,
    /// File with the key that it wants as `Authorization: Bearer KEY`. Read once; the key is never logged.
    pub key_file: Option<PathBuf>,
}

/// A tokenizer and the way to a server. Its engines are all the same server, so there should be one.
pub struct SidecarModel {
    card: ModelCard,
    bundle: TokenizerBundle,
    limits: EngineLimits,
    server: Arc<Server>,
    words: Arc<Words>,
    options: ServerOptions,
}

impl fmt::Debug for SidecarModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SidecarModel({} at {})", self.options.dialect, self.options.url)
    }
}

impl SidecarModel {
    /// Reads the tokenizer at `options.path`: a GGUF file, or a Hugging Face folder, which needs no weights. The server is not
    /// asked yet: it may start later.
    ///
    /// # Errors
    /// Those of reading the files; [`LoadError::Options`] without a path, for a key file that cannot be used, or for a
    /// tokenizer that a server of text alone does not do for.
    pub fn load(options: &ModelOptions, server: &ServerOptions) -> Result<Self, LoadError> {
        let wanted = || format!("an engine of kind {} needs the model's tokenizer: give --model PATH", server.dialect);
        let path = options.path.as_ref().ok_or_else(|| LoadError::Options(wanted()))?;
        let voice = embedded::voice_from(path)?;
        let id = options.served_name.clone().map_or_else(|| embedded::suggested_name(path), Ok)?;
        let malformed = |reason| LoadError::Malformed { path: path.clone(), reason };
        let words = Words::new(&voice.bundle, &voice.eos_ids, voice.vocab_size).map_err(malformed)?;
        if server.dialect == Dialect::OpenAi && !words.joins_anywhere() {
            return Err(LoadError::Options(format!(
                "{}: with --engine openai the tokenizer must give the same text whether it reads it whole or in pieces",
                path.display()
            )));
        }
        let key = server.key_file.as_deref().map(http::read_key).transpose().map_err(LoadError::Options)?;
        let bundle_digest = voice.bundle.digest();
        let seed = SeedParts { model: id.as_str(), tokenizer_digest: &bundle_digest, ..SeedParts::default() };
        // Until the server says how many it has: enough for all sequences at their longest.
        let blocks = voice.context_length.div_ceil(BLOCK_TOKENS).saturating_mul(options.sequences_max);
        Ok(Self {
            card: ModelCard {
                hash_seed: HashSeed::new(seed),
                id,
                architecture: server.dialect.label().to_owned(),
                context_length: voice.context_length,
                vocab_size: voice.vocab_size,
                block_tokens: BLOCK_TOKENS,
                bundle_digest,
                eos_ids: voice.eos_ids,
            },
            bundle: voice.bundle,
            limits: EngineLimits {
                sequences_max: options.sequences_max,
                waiting_max: options.waiting_max,
                batch_tokens_max: options.batch_tokens_max,
                kv_blocks: blocks,
            },
            server: Arc::new(Server::new(server.url.0.clone(), key)),
            words: Arc::new(words),
            options: server.clone(),
        })
    }
}

impl LoadedModel for SidecarModel {
    fn card(&self) -> &ModelCard {
        &self.card
    }

    fn bundle(&self) -> &TokenizerBundle {
        &self.bundle
    }

    fn engine(&self) -> Box<dyn Engine> {
        // No layout: its blocks are not for anybody else.
        let capabilities = Capabilities { card: self.card.clone(), layout_digest: 0, limits: self.limits.clone() };
        Box::new(SidecarEngine::start(capabilities, self.server.clone(), self.words.clone(), &self.options))
    }
}
