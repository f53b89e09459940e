//! Engines around another engine: what they do not do themselves they hand on, by methods that are written here alone.
//!
//! Used by the engine with faults and by tests. Never: decides anything.

/// Writes methods of [`crate::Engine`] that hand on to the engine in the field `inner`.
#[macro_export]
macro_rules! hand_on {
    ($($method:ident)+) => { $($crate::handed_on!($method);)+ };
}

/// One method for [`hand_on!`].
#[doc(hidden)]
#[macro_export]
macro_rules! handed_on {
    (capabilities) => {
        fn capabilities(&self) -> &$crate::contract::Capabilities {
            self.inner.capabilities()
        }
    };
    (submit) => {
        fn submit(
            &mut self,
            request: $crate::contract::SequenceRequest,
        ) -> ::std::result::Result<(), $crate::contract::SubmitError> {
            self.inner.submit(request)
        }
    };
    (cancel) => {
        fn cancel(&mut self, id: $crate::contract::SequenceId) -> bool {
            self.inner.cancel(id)
        }
    };
    (step) => {
        fn step(&mut self) -> ::std::result::Result<$crate::contract::StepOutput, $crate::contract::EngineError> {
            self.inner.step()
        }
    };
    (load) => {
        fn load(&self) -> $crate::contract::EngineLoad {
            self.inner.load()
        }
    };
    (inventory) => {
        fn inventory(&self) -> Vec<(Option<::starling_ids::BlockHash>, ::starling_ids::BlockHash)> {
            self.inner.inventory()
        }
    };
    (export_block) => {
        fn export_block(&self, hash: ::starling_ids::BlockHash) -> Option<$crate::contract::ExportedBlock> {
            self.inner.export_block(hash)
        }
    };
    (import_block) => {
        fn import_block(
            &mut self,
            block: &$crate::contract::ExportedBlock,
        ) -> ::std::result::Result<Vec<::starling_kv::events::KvEvent>, $crate::contract::EngineError> {
            self.inner.import_block(block)
        }
    };
    (memory) => {
        fn memory(&self) -> Option<$crate::backend::KvMemory> {
            self.inner.memory()
        }
    };
    (lend) => {
        fn lend(
            &mut self,
            hashes: &[::starling_ids::BlockHash],
            tokens: &[::starling_ids::TokenId],
            from: usize,
        ) -> Vec<$crate::backend::BlockSlot> {
            self.inner.lend(hashes, tokens, from)
        }
    };
    (give_back) => {
        fn give_back(&mut self, slots: &[$crate::backend::BlockSlot]) {
            self.inner.give_back(slots);
        }
    };
    (reserve) => {
        fn reserve(&mut self, blocks: usize) -> Option<Vec<$crate::backend::BlockSlot>> {
            self.inner.reserve(blocks)
        }
    };
    (adopt) => {
        fn adopt(
            &mut self,
            seed: ::starling_kv::hash::HashSeed,
            tokens: &[::starling_ids::TokenId],
            first: usize,
            slots: &[$crate::backend::BlockSlot],
        ) -> $crate::contract::Adoption {
            self.inner.adopt(seed, tokens, first, slots)
        }
    };
    (lend_live) => {
        fn lend_live(
            &mut self,
            id: $crate::contract::SequenceId,
            from: usize,
        ) -> Option<Vec<$crate::backend::BlockSlot>> {
            self.inner.lend_live(id, from)
        }
    };
    (hand_over) => {
        fn hand_over(&mut self, id: $crate::contract::SequenceId, from: usize) -> Option<$crate::contract::HandedOver> {
            self.inner.hand_over(id, from)
        }
    };
    (take_over) => {
        fn take_over(
            &mut self,
            request: $crate::contract::SequenceRequest,
            carried: $crate::contract::Carried,
        ) -> ::std::result::Result<(), $crate::contract::SubmitError> {
            self.inner.take_over(request, carried)
        }
    };
    (take_events) => {
        fn take_events(&mut self) -> Vec<::starling_kv::events::KvEvent> {
            self.inner.take_events()
        }
    };
    (clear_cache) => {
        fn clear_cache(&mut self) -> Vec<::starling_kv::events::KvEvent> {
            self.inner.clear_cache()
        }
    };
    (open_tiers) => {
        fn open_tiers(
            &mut self,
            options: &::starling_kv::tier::TierOptions,
        ) -> ::std::result::Result<(), ::starling_kv::tier::DiskError> {
            self.inner.open_tiers(options)
        }
    };
    (tier_inventory) => {
        fn tier_inventory(&self) -> Vec<::starling_kv::tier::TierInventory> {
            self.inner.tier_inventory()
        }
    };
    (tier_stats) => {
        fn tier_stats(&self) -> Option<::starling_kv::tier::TierStats> {
            self.inner.tier_stats()
        }
    };
    (tier_reader) => {
        fn tier_reader(&self) -> Option<::starling_kv::tier::TierReader> {
            self.inner.tier_reader()
        }
    };
    (close) => {
        fn close(&mut self, limit: ::std::time::Duration) {
            self.inner.close(limit);
        }
    };
}
