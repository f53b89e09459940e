//! The shape of a Llama model and the checks that make the rest of the engine safe to run.
//!
//! Called by the GGUF and Hugging Face readers; pure. Never: accepts a shape that a kernel cannot hold.

use super::{kernels::generic::LANES, quant::BLOCK};

/// Hyper-parameters of a Llama-architecture model.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct LlamaConfig {
    /// Layers.
    pub(super) layers: usize,
    /// Width of the residual stream.
    pub(super) hidden: usize,
    /// Width inside the feed-forward part.
    pub(super) ffn: usize,
    /// Query heads.
    pub(super) heads: usize,
    /// Key-value heads; divides `heads`.
    pub(super) kv_heads: usize,
    /// Width of a head.
    pub(super) head_dim: usize,
    /// Longest sequence, tokens.
    pub(super) context: usize,
    /// Token ids.
    pub(super) vocab: usize,
    /// Added to the mean square in norms.
    pub(super) epsilon: f32,
    /// Angle of each rotary pair per position, radians; `head_dim / 2` of them.
    pub(super) rotary: Vec<f64>,
}

impl LlamaConfig {
    /// Width of all query heads.
    pub(super) fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of all key heads, or all value heads.
    pub(super) fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Query heads per key-value head.
    pub(super) fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Says what about the shape cannot be computed.
    pub(super) fn check(&self) -> Result<(), String> {
        let counts = [
            ("layers", self.layers, 1, 1024),
            ("heads", self.heads, 1, 1024),
            ("key-value heads", self.kv_heads, 1, 1024),
            ("hidden width", self.hidden, BLOCK, 1 << 17),
            ("feed-forward width", self.ffn, BLOCK, 1 << 18),
            ("head width", self.head_dim, LANES, 512),
            ("context length", self.context, 1, 1 << 24),
            ("vocabulary", self.vocab, 1, 1 << 24),
        ];
        for (name, value, least, most) in counts {
            if !(least..=most).contains(&value) {
                return Err(format!("{name} is {value}, {least} to {most} is supported"));
            }
        }
        for (name, value, unit) in [
            ("hidden width", self.hidden, BLOCK),
            ("feed-forward width", self.ffn, BLOCK),
            ("head width", self.head_dim, LANES),
            ("width of all query heads", self.q_width(), BLOCK),
            ("width of all key-value heads", self.kv_width(), LANES),
        ] {
            if !value.is_multiple_of(unit) {
                return Err(format!("{name} is {value}, a multiple of {unit} is needed"));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(format!("{} query heads cannot share {} key-value heads", self.heads, self.kv_heads));
        }
        if self.rotary.len() != self.head_dim / 2 || !self.rotary.iter().all(|angle| angle.is_finite()) {
            return Err("the rotary angles do not fit the head width".to_owned());
        }
        if !(self.epsilon.is_finite() && self.epsilon > 0.0) {
            return Err(format!("norm epsilon is {}, a small positive number is needed", self.epsilon));
        }
        Ok(())
    }
}

/// Scaling of rotary angles for contexts longer than the one trained on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum RotaryScaling {
    /// None.
    None,
    /// Positions divided by a factor.
    Linear(f64),
    /// Llama 3: long waves are slowed by `factor`, short ones kept, those between blended.
    Llama3 {
        /// Slow-down of long waves.
        factor: f64,
        /// Waves longer than `original / low` are long.
        low: f64,
        /// Waves shorter than `original / high` are short.
        high: f64,
        /// Context trained on first, tokens.
        original: f64,
    },
}

/// Angles per position of `dim / 2` pairs.
pub(super) fn rotary_angles(dim: usize, base: f64, scaling: RotaryScaling) -> Vec<f64> {
    let plain = (0..dim / 2).map(|pair| base.powf(-2.0 * pair as f64 / dim as f64));
    plain
        .map(|angle| match scaling {
            RotaryScaling::None => angle,
            RotaryScaling::Linear(factor) => angle / factor,
            RotaryScaling::Llama3 { factor, low, high, original } => {
                let wave = 2.0 * std::f64::consts::PI / angle;
                if wave < original / high {
                    angle
                } else if wave > original / low {
                    angle / factor
                } else {
                    let smooth = (original / wave - low) / (high - low);
                    (1.0 - smooth) * angle / factor + smooth * angle
                }
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> LlamaConfig {
        LlamaConfig {
            layers: 1,
            hidden: 64,
            ffn: 96,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            context: 128,
            vocab: 100,
            epsilon: 1e-5,
            rotary: rotary_angles(16, 10_000.0, RotaryScaling::None),
        }
    }

    #[test]
    fn shapes_the_kernels_cannot_hold_are_refused() {
        assert_eq!(config().check(), Ok(()));
        assert!(LlamaConfig { hidden: 60, ..config() }.check().unwrap_err().contains("hidden width"));
        assert!(LlamaConfig { kv_heads: 3, ..config() }.check().unwrap_err().contains("share"));
        assert!(LlamaConfig { kv_heads: 0, ..config() }.check().is_err());
        assert!(LlamaConfig { epsilon: f32::NAN, ..config() }.check().is_err());
    }

    #[test]
    fn llama3_scaling_keeps_short_waves_and_slows_long_ones() {
        let scaling = RotaryScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192.0 };
        let plain = rotary_angles(128, 500_000.0, RotaryScaling::None);
        let scaled = rotary_angles(128, 500_000.0, scaling);
        assert_eq!(plain[0], scaled[0]);
        assert_eq!(plain[63] / 8.0, scaled[63]);
        assert!(plain.iter().zip(&scaled).all(|(p, s)| s <= p && *s >= p / 8.0));
    }
}
