//! Shell: loaded models by bundle digest, and the bounded pool that tokenizes long prompts.
//!
//! A bundle is fetched and parsed once, however many requests wait for it; a failure is not kept. Models
//! that nobody serves any more are forgotten by [`PromptModels::retain`].

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, PoisonError},
};

use starling_actors::{engine::ModelCard, generate::GenerateError};
use tokio::sync::{OnceCell, Semaphore};

use crate::{
    backend::Backend,
    error::Fault,
    prompt::{PromptError, PromptModel},
};

/// Prompts up to this many bytes are tokenized where they are: moving them would cost more.
const INLINE_BYTES_MAX: usize = 2 * 1024;

type Slot = Arc<OnceCell<Arc<PromptModel>>>;

/// The models a gateway has loaded.
#[derive(Debug)]
pub(crate) struct PromptModels {
    slots: Mutex<HashMap<String, Slot>>,
    /// One permit per core: tokenizing never takes more threads than that.
    cores: Arc<Semaphore>,
}

impl PromptModels {
    /// Nothing loaded; at most `tasks` prompts are tokenized at once.
    pub(crate) fn new(tasks: usize) -> Self {
        Self { slots: Mutex::default(), cores: Arc::new(Semaphore::new(tasks.max(1))) }
    }

    /// The model of a card, loaded when it is asked for first.
    pub(crate) async fn get(&self, backend: &dyn Backend, card: &ModelCard) -> Result<Arc<PromptModel>, Fault> {
        let slot = self.slot(&card.bundle_digest);
        let load = || async {
            let bundle = backend.bundle(card).await?;
            let model = self.compute(usize::MAX, move || PromptModel::new(&bundle)).await??;
            Ok::<_, Fault>(Arc::new(model))
        };
        slot.get_or_try_init(load).await.cloned()
    }

    /// Forgets every model whose digest is not among `digests`. Requests that use one keep it.
    pub(crate) fn retain(&self, digests: &HashSet<String>) {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner).retain(|digest, _| digests.contains(digest));
    }

    /// Runs work on `bytes` of text: in place when they are few, in the pool otherwise.
    pub(crate) async fn compute<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Fault> {
        if bytes <= INLINE_BYTES_MAX {
            return Ok(work());
        }
        let gone = |what: &str| Fault::Generate(GenerateError::Internal(format!("the tokenizer pool {what}")));
        let permit = self.cores.clone().acquire_owned().await.map_err(|_| gone("is closed"))?;
        // The permit goes with the work, which runs to its end even when nobody waits for it any more.
        let job = tokio::task::spawn_blocking(move || {
            let done = work();
            drop(permit);
            done
        });
        job.await.map_err(|_| gone("lost a job"))
    }

    fn slot(&self, digest: &str) -> Slot {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        slots.entry(digest.to_owned()).or_default().clone()
    }
}

impl From<PromptError> for Fault {
    fn from(error: PromptError) -> Self {
        Self::Prompt(error)
    }
}
