//! Every metric name, once. Labels take closed enums or registered names only, never client text.

/// What kind of number a metric is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// Only rises.
    Counter,
    /// Rises and falls; back at zero at rest unless its help says otherwise.
    Gauge,
    /// A distribution in the unit its name ends with.
    Histogram,
}

macro_rules! metrics {
    ($($variant:ident $kind:ident $name:literal $help:literal)*) => {
        /// The name of a metric. `metrics::counter!(Metric::X.name())` and its kin take it.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Metric { $(#[doc = $help] $variant),* }

        impl Metric {
            /// All of them, in the order of the documentation.
            pub const ALL: &'static [Metric] = &[$(Metric::$variant),*];

            /// The name on `/metrics`.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Metric::$variant => $name),* }
            }

            /// Counter, gauge or histogram.
            #[must_use]
            pub const fn kind(self) -> MetricKind {
                match self { $(Metric::$variant => MetricKind::$kind),* }
            }

            /// One sentence for people.
            #[must_use]
            pub const fn help(self) -> &'static str {
                match self { $(Metric::$variant => $help),* }
            }
        }
    };
}

metrics! {
    GatewayRequests Counter "starling_gateway_requests_total" "Requests by route and status class."
    GatewayInFlight Gauge "starling_gateway_requests_in_flight" "Requests from accept to the end of their body."
    GatewayPermits Gauge "starling_gateway_permits_in_use" "Admission permits held."
    GatewayTtft Histogram "starling_gateway_ttft_seconds" "Time from accept to the first token."
    GatewayItl Histogram "starling_gateway_itl_seconds" "Time between tokens of one stream."
    GatewayCancelled Counter "starling_gateway_cancelled_total" "Requests whose client left before the end."
    GatewayRetries Counter "starling_gateway_retries_total" "Requests sent to another worker before their first token."
    GatewayRetriesDenied Counter "starling_gateway_retries_denied_total" "Second tries not made because there had been too many of them for the requests."
    GatewayResumed Counter "starling_gateway_resumed_total" "Requests that went on elsewhere after their worker was lost, by outcome."
    GatewayMoved Counter "starling_gateway_moved_total" "Moves of running requests to another worker, by outcome; a request that was not moved went on where it was."
    GatewayMoveSeconds Histogram "starling_gateway_move_pause_seconds" "Time between the last token of a worker that was left and the first of the next one."
    RouterDecisions Counter "starling_router_decisions_total" "Decisions by outcome."
    RouterReservations Gauge "starling_router_reservations" "Reservations held for requests in flight."
    RouterRebalanced Counter "starling_router_rebalanced_total" "Running requests that were asked to go on at a worker with much shorter steps."
    RouterFallbacks Counter "starling_router_fallbacks_total" "Decisions taken without the owning shard."
    RouterQueueDepth Gauge "starling_router_queue_depth" "Requests that wait for a worker with room."
    RouterQueueWait Histogram "starling_router_queue_wait_seconds" "Time that requests waited for a worker with room, of those that got one."
    RouterQueueRefused Counter "starling_router_queue_refused_total" "Requests that the queue did not let in or not keep, by reason."
    RouterBreakersOpen Gauge "starling_router_breakers_open" "Workers that keep failing and are tried one request at a time; not zero at rest while there are such."
    RouterBreakerTurns Counter "starling_router_breaker_turns_total" "Times a worker's breaker opened or closed."
    RouterHitPredicted Counter "starling_router_hit_blocks_predicted_total" "Prefix blocks expected on the chosen worker."
    PlannerLeads Gauge "starling_planner_models_led" "Models that this node plans for; not zero at rest."
    PlannerDecisions Counter "starling_planner_decisions_total" "Decisions to change roles or numbers of workers, by action and outcome: advised or begun."
    PlannerWanted Gauge "starling_planner_workers_wanted" "Workers that the planner wants, by model and role; not zero at rest."
    PlannerPressure Gauge "starling_planner_pressure" "Workers that the load takes for each one that is there, by model: above 1 they do not suffice."
    PlannerHooks Counter "starling_planner_hooks_total" "Runs of the program that starts and stops workers, by outcome."
    BudgetLeases Counter "starling_budget_leases_total" "Questions for tokens of a tenant's budget, by outcome; alone is a client that took its part without an owner."
    BudgetTokens Counter "starling_budget_granted_tokens_total" "Tokens granted of the budgets that this node owns."
    BudgetRefused Counter "starling_budget_refused_total" "Requests refused because their tenant's budget was used up."
    RouterRegret Gauge "starling_router_regret_seconds" "By how much another worker would have given the first token sooner, as its next report says: mean over each 16th decision, by model; not zero at rest."
    RouterTtftError Gauge "starling_router_ttft_error_seconds" "How far off the predicted time to the first token was: mean over each 16th decision, by model; not zero at rest."
    RouterTtftBias Gauge "starling_router_ttft_bias_seconds" "The real time to the first token less the predicted one: mean over each 16th decision, by model; not zero at rest."
    IndexBlocks Gauge "starling_index_blocks" "(worker, block) memberships in the prefix index; not zero at rest."
    IndexEvents Counter "starling_index_events_total" "KV events applied."
    IndexResyncs Counter "starling_index_resyncs_total" "Inventories taken after a gap or a reconnect."
    IndexRepairs Counter "starling_index_repairs_total" "Buckets taken again because digests differed: changes that no event had told."
    WorkerRunning Gauge "starling_worker_sequences_running" "Sequences in the batch."
    WorkerWaiting Gauge "starling_worker_sequences_waiting" "Sequences queued at the worker."
    WorkerKvBlocksUsed Gauge "starling_worker_kv_blocks_pinned" "KV blocks pinned by live sequences."
    WorkerKvBlocksCached Gauge "starling_worker_kv_blocks_cached" "KV blocks kept for reuse; not zero at rest."
    WorkerTokensGenerated Counter "starling_worker_tokens_generated_total" "Tokens sampled."
    WorkerTokensPrefilled Counter "starling_worker_tokens_prefilled_total" "Prompt tokens computed."
    WorkerTokensCached Counter "starling_worker_tokens_cached_total" "Prompt tokens taken from the prefix cache."
    WorkerTokensRecomputed Counter "starling_worker_tokens_recomputed_total" "Tokens of requests begun on another worker that were computed again; none after a planned move."
    TransferConverted Counter "starling_transfer_converted_blocks_total" "KV blocks of a worker whose engine lays them out in another order, put into the order of the one that took them."
    TransferRaised Counter "starling_transfer_raised_blocks_total" "KV blocks read from a tier below the device for another worker, by outcome: the tier that they came from, or lost when they were expected and did not come."
    EngineUp Gauge "starling_engine_up" "1 while the server behind a worker can be asked, by kind of engine; 0 while it is away."
    EngineCalls Counter "starling_engine_calls_total" "Calls to the server behind a worker, by kind of engine and outcome."
    EngineEventsLost Counter "starling_engine_events_lost_total" "KV events of the server behind a worker that were lost, by reason: a gap that no replay closed, or a message that cannot be read."
    KvTierBlocks Gauge "starling_kv_tier_blocks" "KV blocks on a tier below the device; not zero at rest."
    KvTierAsked Counter "starling_kv_tier_asked_blocks_total" "Prompt blocks that were not on the device and were looked for below."
    KvTierFetched Counter "starling_kv_tier_fetched_blocks_total" "KV blocks that came back to the device in time, by tier."
    KvTierStored Counter "starling_kv_tier_stored_blocks_total" "KV blocks written to a tier below the device."
    KvTierLost Counter "starling_kv_tier_lost_blocks_total" "KV blocks that a tier gave up or did not take: a loss of cache, never of answers."
    KvTierFaults Counter "starling_kv_tier_faults_total" "KV blocks of a tier that could not be read, were not as written, or could not be written."
    KvTierLate Counter "starling_kv_tier_late_total" "Sequences that stopped waiting for a lower tier and computed."
    KvTierLeft Counter "starling_kv_tier_left_blocks_total" "KV blocks found on a tier below and left there, by reason: they are computed sooner, or the disk does not answer."
    WorkerRejected Counter "starling_worker_rejected_total" "Requests refused by the worker, by reason."
    WorkerStepSeconds Histogram "starling_worker_step_seconds" "Wall time of one engine step."
    WorkerSourced Counter "starling_worker_sourced_total" "Requests whose first KV blocks were to come from another worker, by kind (split or pull) and outcome; what did not come was computed."
    WorkerMovePause Histogram "starling_worker_move_pause_seconds" "Time in which a running request that moved here was in no worker's batch: from the end of its last step there to the beginning of its first step here, both ways of the messages counted."
    TransferTickets Gauge "starling_transfer_tickets_open" "Tickets for KV blocks, by side."
    TransferEnded Counter "starling_transfer_tickets_ended_total" "Tickets that ended, by side and how."
    TransferBytes Counter "starling_transfer_bytes_total" "Bytes of KV blocks pulled, by transport."
    TransferSeconds Histogram "starling_transfer_seconds" "Time of one batch of KV blocks, by transport."
    TransferRate Gauge "starling_transfer_bytes_per_second" "Learned speed of the last session used, by transport; not zero at rest."
    LinksOpen Gauge "starling_links_open" "Links to other nodes; not zero at rest."
    StreamsOpen Gauge "starling_streams_open" "Request streams open on this node, both directions; subscriptions are counted apart."
    SubscriptionsOpen Gauge "starling_subscriptions_open" "Long-lived internal streams; not zero at rest."
    StreamCreditsOut Gauge "starling_stream_credit_bytes_outstanding" "Window of request streams that senders have used and readers have not given back, bytes; 16 KiB at least for each frame."
    StreamsBroken Counter "starling_streams_broken_total" "Streams that ended without an end frame, by reason."
    GossipMembers Gauge "starling_gossip_members" "Members believed alive, this node included; not zero at rest."
    GossipPackets Counter "starling_gossip_packets_total" "Gossip packets by direction."
    SeedsFailing Gauge "starling_seeds_failing" "Seeds whose last lookup failed: names without an address, files that cannot be read."
    GossipDropped Counter "starling_gossip_packets_dropped_total" "Gossip packets refused, by reason."
    NameClashes Counter "starling_name_clashes_total" "Times another process claimed this node's name and was refused."
    StaleRefused Counter "starling_stale_incarnation_refused_total" "Messages about an earlier incarnation, refused."
    ActorRestarts Counter "starling_actor_restarts_total" "Actors restarted by their supervisor, by kind."
    ProgramRetries Counter "starling_program_retries_total" "Calls of programs sent to another instance."
    ProgramInFlight Gauge "starling_program_requests_in_flight" "Requests that handlers of programs work on."
    ProgramTellsLost Counter "starling_program_tells_lost_total" "Messages to remote actors that were not delivered, by reason."
    DirectoryPulls Counter "starling_directory_pulls_total" "Questions for records of other nodes, by outcome."
    DirectoryAsks Counter "starling_directory_asks_total" "Questions about records that other nodes asked, by kind."
    BlobsFetched Counter "starling_blobs_fetched_total" "Blobs fetched from other nodes, by outcome."
    BlobBytes Gauge "starling_blob_bytes" "Bytes of blobs held, own ones and fetched ones; not zero at rest."
    DirectoryFaults Counter "starling_directory_faults_total" "Streams refused by what the directory knew, by kind; nothing was sent."
    RequestFaults Counter "starling_request_faults_total" "Streams that failed on their way, by kind."
    SessionsOpen Gauge "starling_sessions_open" "Actor sessions to other nodes; not zero at rest."
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_counters_end_in_total() {
        let mut names: Vec<_> = Metric::ALL.iter().map(|m| m.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Metric::ALL.len());
        for metric in Metric::ALL {
            assert_eq!(metric.kind() == MetricKind::Counter, metric.name().ends_with("_total"), "{metric:?}");
        }
    }
}
