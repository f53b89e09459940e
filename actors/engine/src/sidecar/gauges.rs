//! How busy a server says it is, from the text of its `/metrics`. Pure.
//!
//! Called by `health`. Series of several engines behind one server are added up, shares averaged. What is not there stays unknown.

/// A server's own account.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct ServerLoad {
    /// Sequences in its batch.
    pub(super) running: Option<u32>,
    /// Sequences queued in it.
    pub(super) waiting: Option<u32>,
    /// Share of its KV memory in use, 0 to 1.
    pub(super) kv_share: Option<f64>,
    /// Tokens that its KV memory holds.
    pub(super) kv_tokens: Option<u64>,
}

/// Reads the samples of vLLM, SGLang and llama.cpp.
pub(super) fn read(text: &str) -> ServerLoad {
    let samples: Vec<Sample<'_>> = text.lines().filter_map(Sample::read).collect();
    let values = |names: &[&str]| -> Vec<f64> {
        let named = samples.iter().filter(|sample| names.contains(&sample.name)).map(|sample| sample.value);
        named.filter(|value| value.is_finite() && *value >= 0.0).collect()
    };
    let sum = |names: &[&str]| {
        let values = values(names);
        // Saturates, as counts of sequences should.
        (!values.is_empty()).then(|| values.iter().sum::<f64>())
    };
    let shares = values(&["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"]);
    let share = (!shares.is_empty()).then(|| shares.iter().sum::<f64>() / shares.len() as f64);
    let blocks: u64 = samples.iter().filter_map(Sample::vllm_tokens).sum();
    ServerLoad {
        running: sum(&["vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing"])
            .map(|value| value as u32),
        waiting: sum(&["vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred"])
            .map(|value| value as u32),
        kv_share: share.map(|share| share.clamp(0.0, 1.0)),
        kv_tokens: sum(&["sglang:max_total_num_tokens"]).map(|value| value as u64).or((blocks > 0).then_some(blocks)),
    }
}

/// One line: `name{label="value",…} value`.
struct Sample<'a> {
    name: &'a str,
    labels: &'a str,
    value: f64,
}

impl<'a> Sample<'a> {
    fn read(line: &'a str) -> Option<Self> {
        if line.starts_with('#') {
            return None;
        }
        let (series, value) = line.trim_end().rsplit_once(' ')?;
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        Some(Self { name: name.trim(), labels: labels.trim_end_matches('}'), value: value.parse().ok()? })
    }

    fn label(&self, name: &str) -> Option<u64> {
        let (_, rest) = self.labels.split_once(&format!("{name}=\""))?;
        rest.split_once('"')?.0.parse().ok()
    }

    /// Tokens of vLLM's pool, which it tells in the labels of a constant.
    fn vllm_tokens(&self) -> Option<u64> {
        if self.name != "vllm:cache_config_info" {
            return None;
        }
        self.label("num_gpu_blocks")?.checked_mul(self.label("block_size")?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vllm_is_read() {
        let text = "# HELP vllm:num_requests_running Number\n# TYPE vllm:num_requests_running gauge\n\
            vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 3.0\nvllm:num_requests_running{engine=\"1\",model_name=\"m\"} 2.0\n\
            vllm:num_requests_waiting{engine=\"0\",model_name=\"m\"} 7.0\nvllm:kv_cache_usage_perc{engine=\"0\",model_name=\"m\"} 0.25\n\
            vllm:cache_config_info{block_size=\"16\",cache_dtype=\"auto\",num_gpu_blocks=\"1000\",num_gpu_blocks_override=\"None\"} 1.0\n";
        let load = ServerLoad { running: Some(5), waiting: Some(7), kv_share: Some(0.25), kv_tokens: Some(16_000) };
        assert_eq!(read(text), load);
    }

    #[test]
    fn sglang_and_llama_cpp_are_read_and_nonsense_is_not() {
        let text = "sglang:num_running_reqs{model_name=\"m\"} 4.0\nsglang:num_queue_reqs{model_name=\"m\"} 1.0\n\
            sglang:token_usage{model_name=\"m\"} 0.5\nsglang:max_total_num_tokens{model_name=\"m\"} 4096\n";
        let load = ServerLoad { running: Some(4), waiting: Some(1), kv_share: Some(0.5), kv_tokens: Some(4_096) };
        assert_eq!(read(text), load);
        let load = read("llamacpp:requests_processing 2\nllamacpp:requests_deferred 9\n");
        assert_eq!((load.running, load.waiting, load.kv_share), (Some(2), Some(9), None));
        assert_eq!(
            read("vllm:num_requests_running NaN\n{} {}\n\nvllm:num_requests_waiting{ -1"),
            ServerLoad::default()
        );
    }
}
