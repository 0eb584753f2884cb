//! Rows being sampled, and the step that adds a token to each.

use rand::Rng;
use rand_chacha::ChaCha8Rng;
use tch::{Kind, Tensor};

use super::draw::draw;
use super::{Sample, SampleRequest, SamplingOptions, StopReason};
use crate::error::{Error, Result};
use crate::objective::precise;

/// A row with what was drawn for it so far.
pub(super) struct Row {
    index: usize,
    /// Context and tokens.
    prefix: Vec<i64>,
    context: usize,
    generator: ChaCha8Rng,
    logprobs: Vec<f64>,
    sampler_logprobs: Vec<f64>,
    stop: Option<StopReason>,
}

impl Row {
    pub fn new(index: usize, request: SampleRequest) -> Self {
        Self {
            index,
            prefix: request.context.to_vec(),
            context: request.context.len(),
            generator: request.generator,
            logprobs: Vec::new(),
            sampler_logprobs: Vec::new(),
            stop: None,
        }
    }

    /// Its place among the requests.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Context and tokens.
    pub fn prefix(&self) -> &[i64] {
        &self.prefix
    }

    pub fn is_running(&self) -> bool {
        self.stop.is_none()
    }

    pub fn into_sample(self) -> Sample {
        Sample {
            tokens: self.prefix[self.context..].to_vec(),
            logprobs: self.logprobs,
            sampler_logprobs: self.sampler_logprobs,
            // A row runs until it has a reason to stop.
            stop: self.stop.unwrap_or(StopReason::Limit),
        }
    }

    /// A number in `[0, 1)` with so few bits that its product with a total, in `kind`, is below the
    /// total.
    fn uniform(&mut self, kind: Kind) -> f64 {
        let bits = if kind == Kind::Double { 52 } else { 23 };
        (self.generator.next_u64() >> (64 - bits)) as f64 * 0.5_f64.powi(bits)
    }
}

/// What every step of sampling needs.
pub(super) struct Sampler<'a> {
    pub options: &'a SamplingOptions,
    pub ends: &'a mut dyn FnMut(usize, &[i64]) -> bool,
}

impl Sampler<'_> {
    /// Adds a token to each row, drawn from its logits among `[n, V]`, and ends rows.
    pub fn draw(&mut self, rows: &mut [&mut Row], logits: &Tensor) -> Result<()> {
        let device = logits.device();
        let kind = precise(device);
        let uniforms = (!self.options.greedy).then(|| {
            let numbers: Vec<f64> = rows.iter_mut().map(|row| row.uniform(kind)).collect();
            Tensor::from_slice(&numbers).to_kind(kind).to_device(device).unsqueeze(-1)
        });
        let drawn = draw(logits, uniforms.as_ref(), self.options)?;
        // The one synchronisation of a step.
        let drawn = Vec::<f64>::try_from(drawn.to_kind(Kind::Double).reshape([-1]))?;
        let (tokens, log_probs) = drawn.split_at(rows.len());
        let (logprobs, sampler_logprobs) = log_probs.split_at(rows.len());
        for (place, row) in rows.iter_mut().enumerate() {
            require_finite(row, logprobs[place])?;
            row.prefix.push(tokens[place] as i64);
            row.logprobs.push(logprobs[place]);
            row.sampler_logprobs.push(sampler_logprobs[place]);
            self.end(row);
        }
        Ok(())
    }

    fn end(&mut self, row: &mut Row) {
        let tokens = &row.prefix[row.context..];
        let ends = (self.ends)(row.index, tokens);
        let is_stop = tokens.last().is_some_and(|token| self.options.stop_tokens.contains(token));
        row.stop = if is_stop {
            Some(StopReason::Token)
        } else if ends {
            Some(StopReason::Text)
        } else {
            (tokens.len() >= self.options.max_tokens).then_some(StopReason::Limit)
        };
    }
}

/// A softmax of logits that hold NaN or +∞, or are all −∞, is NaN everywhere.
fn require_finite(row: &Row, logprob: f64) -> Result<()> {
    if logprob.is_finite() {
        return Ok(());
    }
    Err(Error::NonFinite {
        place: format!("row {}, token {}", row.index, row.logprobs.len()),
        what: "the log-probability of a sampled token".into(),
        found: logprob,
        remedy: "its logits hold NaN or +infinity or are all -infinity, or the temperature is too small for their dtype: look at the weights (an update that diverged), or sample in float32 or float64".into(),
    })
}
