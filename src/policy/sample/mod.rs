//! Sampling from a causal language model.

mod cache;
mod draw;
mod rows;

pub(super) use cache::{CACHED_SCHEMA, CacheMethod, find_cache};

use rand_chacha::ChaCha8Rng;

use self::cache::CachedPass;
use self::rows::{Row, Sampler};
use super::{Continuation, Policy, PolicyKind};
use crate::error::{Error, Result};

/// How tokens are drawn.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingOptions {
    /// Divides the logits; above 0.
    pub temperature: f64,
    /// The most likely token (of the lowest id on ties) instead of a draw, for validation. The
    /// generators, `top_k` and `top_p` then have no say.
    pub greedy: bool,
    /// So many most likely tokens are drawn from, and those tied with the last of them.
    pub top_k: Option<usize>,
    /// The smallest set of most likely tokens whose mass reaches this is drawn from, after
    /// temperature and `top_k`; of tied tokens those of lower ids are taken first. In (0, 1]; 1 is off.
    pub top_p: f64,
    /// The most tokens of a row.
    pub max_tokens: usize,
    /// Tokens that end their row; they are kept as its last.
    pub stop_tokens: Vec<i64>,
    /// The padded tokens of a forward pass: rows are split into batches by it, sorted by length, and
    /// a batch has at least one. With a cache it bounds what the cache may come to hold, contexts
    /// and `max_tokens`.
    pub token_budget: usize,
    /// Uses the policy's `forward_cached` if it has one.
    pub use_cache: bool,
}

/// A row to be sampled.
#[derive(Clone, Debug)]
pub struct SampleRequest<'a> {
    /// At least one token id.
    pub context: &'a [i64],
    /// The stream of this row alone: one number is drawn for each token.
    pub generator: ChaCha8Rng,
}

/// What was drawn for a row. Its arrays are of one length.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// At least one token id.
    pub tokens: Vec<i64>,
    /// Log-probabilities under softmax(logits/temperature) over the whole vocabulary: the
    /// `old_logprobs` of a trajectory.
    pub logprobs: Vec<f64>,
    /// Log-probabilities under the distribution that was drawn from, truncated and renormalised. Of
    /// a greedy choice: 0.
    pub sampler_logprobs: Vec<f64>,
    /// Why it ends.
    pub stop: StopReason,
}

/// Why a row ends; the first that holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// At a stop token.
    Token,
    /// The caller ended it, at a stop string for one.
    Text,
    /// At the most tokens of a row.
    Limit,
}

impl Policy {
    /// Draws a continuation of each context, in the order of the requests.
    ///
    /// `ends(row, tokens)` is asked after each token of a row, with all its tokens so far; true ends
    /// the row. Rows that have ended leave their batch. A row's draws depend on its context and its
    /// generator alone, whatever rows it shares a batch with (to the rounding of the logits, which a
    /// device may do differently in batches of different sizes).
    ///
    /// A token is drawn on the device by the inverse of the cumulated probabilities, in float64 where
    /// the device has that, from one number of the row's generator; a token of probability 0 is never
    /// drawn. The host waits for the device once a forward pass. No gradient is recorded.
    ///
    /// # Key-value cache
    ///
    /// Without a cache every token takes a forward pass over the whole prefixes. A scripted module can
    /// offer a second method (`@torch.jit.export`):
    ///
    /// ```python
    /// def forward_cached(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor,
    ///                    cache: List[Tensor]) -> Tuple[Tensor, List[Tensor]]:
    /// ```
    ///
    /// * `input_ids` `[B, T]`, int64: tokens that follow those in the cache. The first call has the
    ///   contexts and an empty cache; each later one has one token a row, and the cache that the call
    ///   before it returned.
    /// * `attention_mask` `[B, P + T]`, int64: 1 on the tokens of the P columns in the cache and on the
    ///   new ones, 0 on padding. Rows of unequal length are padded on the left, and padded columns stay
    ///   in the cache.
    /// * `position_ids` `[B, T]`, int64: 0 at the first token of each row, padding not counted (0 on
    ///   padding).
    /// * Returned are the logits `[B, T, V]` and the new cache: any number of tensors, of any shape as
    ///   long as the batch is dimension 0, since rows that end are dropped from each by `index_select`,
    ///   and equal contexts are read once and then repeated by it.
    ///
    /// The argument names are free, the types are not. Before a policy's cache is first used, it is
    /// held to forward on a row of the batch and a part of it: a padded first call, a token, a row
    /// dropped, another token.
    ///
    /// # Errors
    /// If the policy is no causal language model, an option or a context is out of its range (a
    /// context is empty or holds an id outside the vocabulary), logits to draw from are NaN, +∞ or all
    /// −∞ ([`Error::NonFinite`]), the cache gives other logits than forward, or libtorch fails.
    pub fn sample(
        &self,
        requests: Vec<SampleRequest>,
        options: &SamplingOptions,
        ends: &mut dyn FnMut(usize, &[i64]) -> bool,
    ) -> Result<Vec<Sample>> {
        self.check_sampling(&requests, options)?;
        let _no_grad = tch::no_grad_guard();
        let mut rows: Vec<Row> = requests
            .into_iter()
            .enumerate()
            .map(|(index, request)| Row::new(index, request))
            .collect();
        // Each row gains one token at a time: an order by length lasts.
        rows.sort_by_key(|row| std::cmp::Reverse(row.prefix().len()));
        let mut sampler = Sampler { options, ends };
        if options.use_cache && self.has_cache() {
            self.sample_cached(&mut rows, &mut sampler)?;
        } else {
            self.sample_plain(&mut rows, &mut sampler)?;
        }
        rows.sort_by_key(Row::index);
        Ok(rows.into_iter().map(Row::into_sample).collect())
    }

    /// Whether the module has a `forward_cached` of the schema that [`sample`](Self::sample) uses.
    pub fn has_cache(&self) -> bool {
        self.has_cache
    }

    fn sample_plain(&self, rows: &mut [Row], sampler: &mut Sampler) -> Result<()> {
        let mut running: Vec<&mut Row> = rows.iter_mut().collect();
        while !running.is_empty() {
            let mut rest = running.as_mut_slice();
            while let Some(longest) = rest.first() {
                let (batch, left) = split(rest, longest.prefix().len(), sampler.options);
                let prefixes: Vec<&[i64]> = batch.iter().map(|row| row.prefix()).collect();
                let logits = self.next_logits(&prefixes)?;
                sampler.draw(batch, &logits)?;
                rest = left;
            }
            running.retain(|row| row.is_running());
        }
        Ok(())
    }

    fn sample_cached(&self, rows: &mut [Row], sampler: &mut Sampler) -> Result<()> {
        if let (Some(longest), false) = (rows.first(), self.cache_is_checked.get()) {
            self.check_cache(longest.prefix())?;
        }
        let mut running: Vec<&mut Row> = rows.iter_mut().collect();
        let mut rest = running.as_mut_slice();
        while let Some(longest) = rest.first() {
            let most = longest.prefix().len().saturating_add(sampler.options.max_tokens);
            let (batch, left) = split(rest, most, sampler.options);
            self.decode(batch.iter_mut().map(|row| &mut **row).collect(), sampler)?;
            rest = left;
        }
        Ok(())
    }

    /// One batch, to its end.
    fn decode(&self, mut batch: Vec<&mut Row>, sampler: &mut Sampler) -> Result<()> {
        let prefixes: Vec<&[i64]> = batch.iter().map(|row| row.prefix()).collect();
        let (mut pass, mut logits) = CachedPass::start(self, &prefixes)?;
        loop {
            sampler.draw(&mut batch, &logits)?;
            let running = (0..batch.len()).filter(|place| batch[*place].is_running());
            pass.keep(&running.map(|place| place as i64).collect::<Vec<i64>>())?;
            batch.retain(|row| row.is_running());
            let last: Vec<i64> =
                batch.iter().filter_map(|row| row.prefix().last().copied()).collect();
            if last.is_empty() {
                return Ok(());
            }
            logits = pass.next(&last)?;
        }
    }

    /// The logits `[n, V]` of what follows each prefix, in one forward pass padded on the right.
    fn next_logits(&self, prefixes: &[&[i64]]) -> Result<tch::Tensor> {
        // Its last token is asked for and not read.
        let rows: Vec<Continuation> = prefixes
            .iter()
            .map(|prefix| Continuation { context: prefix, tokens: &[0], asked: &[true] })
            .collect();
        Ok(self.continuation_logits(&rows)?.logits)
    }

    fn check_sampling(&self, requests: &[SampleRequest], options: &SamplingOptions) -> Result<()> {
        let refuse = |argument, expected: &str, found: String| {
            Err(Error::Argument { argument, expected: expected.into(), found })
        };
        if self.options.kind != PolicyKind::CausalLm {
            return refuse("policy", "one of kind causal_lm", "a step policy".into());
        }
        let &SamplingOptions { temperature, top_k, top_p, max_tokens, .. } = options;
        if !(temperature > 0.0 && temperature.is_finite()) {
            return refuse("temperature", "a number above 0", temperature.to_string());
        }
        if top_k == Some(0) {
            return refuse("top_k", "at least 1, or none", "0".into());
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return refuse("top_p", "a number above 0 and at most 1", top_p.to_string());
        }
        if max_tokens == 0 {
            return refuse("max_tokens", "at least 1", "0".into());
        }
        for (row, SampleRequest { context, .. }) in requests.iter().enumerate() {
            if context.is_empty() {
                return refuse("context", "at least one token", format!("none in row {row}"));
            }
            let vocabulary = 0..self.choices;
            if let Some(id) = context.iter().find(|id| !vocabulary.contains(id)) {
                let expected = format!("ids in {vocabulary:?}, the vocabulary of the policy");
                return refuse("context", &expected, format!("{id} in row {row}"));
            }
        }
        Ok(())
    }
}

/// The first rows that fit the budget at `width` tokens each, at least one, and the others.
fn split<'r, 'a>(
    rows: &'r mut [&'a mut Row],
    width: usize,
    options: &SamplingOptions,
) -> (&'r mut [&'a mut Row], &'r mut [&'a mut Row]) {
    let fitting = options.token_budget / width.max(1);
    let count = rows.len();
    rows.split_at_mut(fitting.clamp(1, count.max(1)).min(count))
}
