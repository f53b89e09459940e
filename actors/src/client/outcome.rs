//! What a failed try means: try elsewhere, or give the client its answer. Pure.
//!
//! Called by the generate loop and by the stream. This is the one table from stream errors to [`GenerateError`].

use starling_cluster::stream::{Fault, FaultKind, StreamError};
use starling_ids::WorkerId;

use crate::generate::{GenerateError, TENANT};

/// Retry time told when nobody named one, milliseconds.
const RETRY_AFTER_MS: u64 = 1_000;

/// What happened to the tries so far.
#[derive(Debug, Default)]
pub(super) struct Tries {
    /// Workers not to be asked again.
    pub(super) exclude: Vec<WorkerId>,
    /// Those of them that failed.
    pub(super) failed: Vec<WorkerId>,
    retry_after_ms: Option<u64>,
    reason: Option<String>,
    /// What the shard said last, when nothing else may be tried.
    last_word: Option<GenerateError>,
}

impl Tries {
    /// Of a request that runs at a worker and looks for another one. A shard of an older release knows it by this alone.
    pub(super) fn away_from(worker: Option<&WorkerId>) -> Self {
        Self { exclude: worker.into_iter().cloned().collect(), ..Self::default() }
    }

    /// Notes that a worker could not take the request. An error is final: no other worker would do better.
    pub(super) fn note(&mut self, worker: &WorkerId, error: StreamError) -> Result<(), GenerateError> {
        let reason = format!("{worker}: {error}");
        match error {
            StreamError::Rejected(fault) => self.refused(worker, fault)?,
            StreamError::TooLarge { len, limit } => {
                let message = format!("the request has {len} bytes, at most {limit} are possible");
                return Err(GenerateError::Invalid { message, param: None });
            }
            _ => self.failed.push(worker.clone()),
        }
        self.exclude.push(worker.clone());
        self.reason = Some(reason);
        Ok(())
    }

    /// Notes that the shard found nobody.
    pub(super) fn note_shard(&mut self, fault: Fault) {
        let retry_after_ms = fault.retry_after_ms.unwrap_or(RETRY_AFTER_MS);
        self.last_word = match fault.kind {
            FaultKind::DeadlineExceeded => Some(GenerateError::Deadline),
            FaultKind::Overloaded if fault.param.as_deref() == Some(TENANT) => {
                Some(GenerateError::TenantLimit { reason: fault.message.clone(), retry_after_ms })
            }
            _ => None,
        };
        if fault.kind == FaultKind::Overloaded && self.exclude.is_empty() {
            self.retry_after_ms = Some(fault.retry_after_ms.unwrap_or(RETRY_AFTER_MS));
        }
        self.reason.get_or_insert(fault.message);
    }

    /// What the client is told when no try is left. One refusal for want of room is enough to say "try later".
    pub(super) fn verdict(self) -> GenerateError {
        if let Some(error) = self.last_word {
            return error;
        }
        match (self.retry_after_ms, self.reason) {
            (Some(retry_after_ms), _) => GenerateError::Overloaded { retry_after_ms },
            (None, Some(reason)) => GenerateError::Unavailable(reason),
            (None, None) => GenerateError::Unavailable("no worker is left to try".to_owned()),
        }
    }

    fn refused(&mut self, worker: &WorkerId, fault: Fault) -> Result<(), GenerateError> {
        match fault.kind {
            FaultKind::Invalid => {
                return Err(GenerateError::Invalid { message: fault.message, param: fault.param });
            }
            FaultKind::DeadlineExceeded => return Err(GenerateError::Deadline),
            FaultKind::Overloaded => {
                let ms = fault.retry_after_ms.unwrap_or(RETRY_AFTER_MS);
                self.retry_after_ms = Some(self.retry_after_ms.map_or(ms, |known| known.min(ms)));
            }
            FaultKind::Draining | FaultKind::StaleIncarnation => {}
            // Not found: the directory here is behind, and nobody should be sent there now.
            FaultKind::NotFound | FaultKind::Unavailable | FaultKind::Internal => self.failed.push(worker.clone()),
        }
        Ok(())
    }
}

/// Whether a failed try is the worker's fault: no link, silence, a break, an inner error. What the directory should have known,
/// want of room, a drain and whatever the request itself is to blame for are not.
pub(super) fn is_fault(error: &StreamError) -> bool {
    let broken = |kind: FaultKind| matches!(kind, FaultKind::Internal | FaultKind::Unavailable);
    match error {
        StreamError::Connect { .. } | StreamError::Broken(_) | StreamError::Inactive(_) | StreamError::Deadline => true,
        StreamError::Rejected(fault) | StreamError::Failed(fault) => broken(fault.kind),
        StreamError::UnknownNode(_) | StreamError::Down { .. } | StreamError::Stale { .. } => false,
        StreamError::Cancelled | StreamError::TooLarge { .. } => false,
    }
}

/// What a client is told when an accepted stream fails.
pub(super) fn lost(worker: &WorkerId, error: StreamError) -> GenerateError {
    match error {
        StreamError::Deadline => GenerateError::Deadline,
        StreamError::Failed(fault) if fault.kind == FaultKind::DeadlineExceeded => GenerateError::Deadline,
        other => GenerateError::WorkerLost { worker: worker.clone(), reason: other.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use starling_ids::NodeId;

    use super::*;

    fn worker() -> WorkerId {
        WorkerId { node: NodeId::new("n").expect("name"), index: 0 }
    }

    fn rejected(kind: FaultKind) -> StreamError {
        StreamError::Rejected(Fault::new(kind, "no"))
    }

    #[test]
    fn a_client_fault_is_final_and_never_tried_elsewhere() {
        let mut tries = Tries::default();
        let fault = Fault { param: Some("prompt".to_owned()), ..Fault::new(FaultKind::Invalid, "bad") };
        let error = tries.note(&worker(), StreamError::Rejected(fault)).expect_err("final");
        assert_eq!(error, GenerateError::Invalid { message: "bad".to_owned(), param: Some("prompt".to_owned()) });
        assert!(tries.exclude.is_empty() && tries.failed.is_empty());
        assert_eq!(tries.note(&worker(), rejected(FaultKind::DeadlineExceeded)), Err(GenerateError::Deadline));
    }

    #[test]
    fn a_refusal_is_not_a_failure() {
        for (kind, failed) in [
            (FaultKind::Overloaded, false),
            (FaultKind::Draining, false),
            (FaultKind::StaleIncarnation, false),
            (FaultKind::NotFound, true),
            (FaultKind::Unavailable, true),
            (FaultKind::Internal, true),
        ] {
            let mut tries = Tries::default();
            tries.note(&worker(), rejected(kind)).expect("elsewhere");
            assert_eq!((tries.exclude.len(), tries.failed.len()), (1, usize::from(failed)), "{kind:?}");
        }
    }

    #[test]
    fn client_faults_and_want_of_room_never_count_against_a_worker() {
        for kind in [FaultKind::Invalid, FaultKind::Overloaded, FaultKind::Draining, FaultKind::StaleIncarnation] {
            assert!(!is_fault(&rejected(kind)), "{kind:?}");
        }
        assert!(!is_fault(&StreamError::Cancelled) && !is_fault(&rejected(FaultKind::DeadlineExceeded)));
        let node = NodeId::new("n").expect("name");
        assert!(
            is_fault(&StreamError::Connect { node, reason: String::new() }) && is_fault(&rejected(FaultKind::Internal))
        );
        assert!(is_fault(&StreamError::Broken(String::new())) && is_fault(&StreamError::Inactive(1)));
    }

    #[test]
    fn the_tenants_own_limit_is_not_the_clusters() {
        let mut tries = Tries::default();
        let fault = Fault { param: Some(TENANT.to_owned()), ..Fault::new(FaultKind::Overloaded, "yours") };
        tries.note_shard(fault.retry_after_ms(3_000));
        let reason = "yours".to_owned();
        assert_eq!(tries.verdict(), GenerateError::TenantLimit { reason, retry_after_ms: 3_000 });
        let mut tries = Tries::default();
        tries.note_shard(Fault::new(FaultKind::DeadlineExceeded, "late"));
        assert_eq!(tries.verdict(), GenerateError::Deadline);
    }

    #[test]
    fn overload_says_when_to_try_again_and_silence_says_who_failed() {
        let mut tries = Tries::default();
        tries
            .note(&worker(), StreamError::Rejected(Fault::new(FaultKind::Overloaded, "").retry_after_ms(700)))
            .unwrap();
        tries.note(&worker(), StreamError::Broken("gone".to_owned())).expect("elsewhere");
        assert_eq!(tries.verdict(), GenerateError::Overloaded { retry_after_ms: 700 });
        let mut tries = Tries::default();
        tries.note(&worker(), StreamError::Broken("gone".to_owned())).expect("elsewhere");
        tries.note_shard(Fault::new(FaultKind::Overloaded, "every worker refused"));
        assert_eq!(tries.verdict(), GenerateError::Unavailable("n/0: stream broken: gone".to_owned()));
    }
}
