//! Times the default worker selection of `dynamo-kv-router` 1.6.1 for 32, 1,024 and 10,000 workers; one line of JSON each.
//!
//! `selection [--workers 32,1024,10000] [--samples 3000]`. The same sizes and loads as in its own bench `worker_selection`:
//! a prompt of 2,048 tokens, blocks of 16, and for worker n: (n mod 32) x 64 tokens cached, 16 n tokens of prompts waiting,
//! n mod 127 blocks and n mod 17 requests active.

use std::{
    collections::{HashMap, HashSet},
    hint::black_box,
    time::Instant,
};

use dynamo_kv_router::{
    DefaultWorkerSelector, KvRouterConfig, SchedulingRequest, WorkerLoadProjection, WorkerSelectionInput, WorkerSelector,
    protocols::{RoutingConstraints, WorkerConfigLike, WorkerWithDpRank},
    scheduling::{OverlapSignals, ScheduleMode},
};

#[derive(Default)]
struct Worker {
    taints: HashSet<String>,
}

impl WorkerConfigLike for Worker {
    fn data_parallel_start_rank(&self) -> u32 {
        0
    }

    fn data_parallel_size(&self) -> u32 {
        1
    }

    fn max_num_batched_tokens(&self) -> Option<u64> {
        None
    }

    fn total_kv_blocks(&self) -> Option<u64> {
        Some(131_072)
    }

    fn taints(&self) -> &HashSet<String> {
        &self.taints
    }
}

fn request(workers: u64) -> SchedulingRequest {
    let all = || (0..workers).map(|n| (n as usize, WorkerWithDpRank::from_worker_id(n)));
    let cached = |n: usize| n % 32 * 64;
    let load = |n: usize| WorkerLoadProjection {
        active_prefill_tokens: 16 * n,
        active_decode_blocks: n % 127,
        active_requests: n % 17,
        ..Default::default()
    };
    SchedulingRequest {
        mode: ScheduleMode::QueryOnly { request_id: None },
        token_seq: None,
        isl_tokens: 2_048,
        lora_name: None,
        expected_output_tokens: Some(256),
        affinity_target: None,
        pinned_worker: None,
        allowed_worker_ids: None,
        routing_constraints: RoutingConstraints { required_taints: HashSet::new(), preferred_taints: HashMap::new() },
        router_config_override: None,
        track_prefill_tokens: true,
        priority_jump: 0.0,
        strict_priority: 0,
        policy_class: None,
        session_context: None,
        overlap: OverlapSignals {
            tier_overlap_blocks: Default::default(),
            effective_overlap_blocks: all().map(|(n, worker)| (worker, cached(n) as f64 / 16.0)).collect(),
            effective_cached_tokens: all().map(|(n, worker)| (worker, cached(n))).collect(),
        },
        kv_transfer_candidates: None,
        retain_kv_transfer_chain: false,
        shared_cache_hits: None,
        worker_loads: all().map(|(n, worker)| (worker, load(n))).collect(),
        resp_tx: None,
    }
}

fn measure(workers: usize, samples: usize) {
    let known: HashMap<u64, Worker> = (0..workers as u64).map(|n| (n, Worker::default())).collect();
    let request = request(workers as u64);
    let selector = DefaultWorkerSelector::new(Some(KvRouterConfig::default()), "prefill");
    let group = (2_000 / workers).clamp(1, 64) as u64;
    let mut times: Vec<u64> = (0..samples)
        .map(|_| {
            let began = Instant::now();
            for _ in 0..group {
                let input =
                    WorkerSelectionInput::configured(black_box(&known), black_box(&request), request.eligibility(), 16);
                black_box(selector.select_worker(input).expect("somebody"));
            }
            began.elapsed().as_nanos() as u64 / group
        })
        .collect();
    times.sort_unstable();
    let (p50, p99) = (times[samples / 2], times[samples * 99 / 100]);
    println!("{{\"what\":\"choose\",\"workers\":{workers},\"p50_ns\":{p50},\"p99_ns\":{p99},\"samples\":{samples}}}");
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let text = |name: &str| arguments.iter().position(|word| word == name).and_then(|at| arguments.get(at + 1));
    let samples = text("--samples").map_or(3_000, |word| word.parse().expect("a number"));
    for workers in text("--workers").map_or("32,1024,10000", String::as_str).split(',') {
        measure(workers.parse().expect("a number"), samples);
    }
}
