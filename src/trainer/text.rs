//! Trajectories of a language model in a text environment.

use std::ops::Range;

use tch::Tensor;

use super::source::{Outcome, SampledGroup, Source, SourceRequest, Visit};
use crate::config::{EnvironmentConfig, SamplingConfig};
use crate::env::{self, Environment, Episode, Rules, Seed, Tags};
use crate::error::{Error, Result};
use crate::objective::OverlongPenalty;
use crate::policy::{Policy, Sample, SampleRequest, SamplingOptions, StopReason};
use crate::rollout::{Content, Group, TextTokenizer, Trajectory};

/// Tokens beyond the length of a stop text that are decoded to look for it.
const STOP_MARGIN: usize = 8;

/// Plays a text environment, every trajectory of a request side by side, a turn at a time.
pub struct TextSource {
    environment: Box<dyn Environment>,
    rules: Rules,
    tokenizer: TextTokenizer,
    sampling: SamplingConfig,
    temperature: f64,
    /// Stops that are one token.
    stop_tokens: Vec<i64>,
    /// The others.
    stop_texts: Vec<String>,
    overlong: Option<OverlongPenalty>,
    warnings: Vec<String>,
    /// Whether it was said that there is no cache.
    told_cache: bool,
    /// Whether it was said that prompts are not given back.
    told_prompt: bool,
}

impl TextSource {
    /// A source of trajectories in an environment, sampled at a temperature.
    ///
    /// # Errors
    /// If the environment or the tokenizer cannot be had.
    pub fn new(
        environment: &EnvironmentConfig,
        sampling: &SamplingConfig,
        temperature: f64,
    ) -> Result<Self> {
        let key = "sampling.tokenizer";
        let path = sampling.tokenizer.as_deref().ok_or_else(|| {
            Error::config(key, "expected the tokenizer.json of the policy, found none")
        })?;
        let tokenizer = TextTokenizer::load(path, key)?;
        let rules = environment.rules().clone();
        let environment = environment.environment()?;
        let (mut stop_tokens, mut stop_texts) = (Vec::new(), Vec::new());
        for stop in &sampling.stop {
            match tokenizer
                .encode(stop)
                .map_err(|problem| Error::config("sampling.stop", problem))?[..]
            {
                [token] => stop_tokens.push(token),
                _ => stop_texts.push(stop.clone()),
            }
        }
        Ok(Self {
            environment,
            rules,
            tokenizer,
            sampling: sampling.clone(),
            temperature,
            stop_tokens,
            stop_texts,
            overlong: sampling.overlong_penalty(),
            warnings: Vec::new(),
            told_cache: false,
            told_prompt: false,
        })
    }

    fn rows(&mut self, request: &SourceRequest) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for Visit { task, visit } in &request.visits {
            let group = env::Group::start(
                self.environment.as_ref(),
                &self.rules,
                request.group_size,
                *task,
                *visit,
            )?;
            let prompt = self.encode(&self.sampling.prompt_format, &group.prompt())?;
            if !self.told_prompt && !self.gives_back(&prompt, &group.prompt())? {
                self.told_prompt = true;
                self.warnings.push(format!(
                    "sampling.tokenizer does not give back the prompts that it is given, so the policy does not read all of them: is it the policy's? The first is `{}`, and is read as `{}`",
                    group.prompt(),
                    self.decode(&prompt)?
                ));
            }
            if prompt.is_empty() {
                return Err(self.refuse("expected a prompt of at least one token, found none"));
            }
            if let Some(length) = self.bound_without_room(prompt.len()) {
                return Err(self.refuse(format!(
                    "expected room for a prompt of {} tokens and a response of up to {} in sampling.context_length, found {length}",
                    prompt.len(),
                    self.sampling.max_tokens
                )));
            }
            for (trajectory, episode) in group.episodes.into_iter().enumerate() {
                let seed = Seed { task: *task, visit: *visit, trajectory: trajectory as u64 };
                rows.push(Row::new(episode, seed, prompt.clone()));
            }
        }
        Ok(rows)
    }

    /// Every row that is not over takes a turn; false if there is none.
    fn turn(&self, policy: &Policy, options: &SamplingOptions, rows: &mut [Row]) -> Result<bool> {
        let running: Vec<usize> = (0..rows.len()).filter(|row| rows[*row].is_running()).collect();
        if running.is_empty() {
            return Ok(false);
        }
        let contexts: Vec<Vec<i64>> = running.iter().map(|row| rows[*row].tokens()).collect();
        let requests = running
            .iter()
            .zip(&contexts)
            .map(|(row, context)| SampleRequest { context, generator: rows[*row].generator() })
            .collect();
        let mut ends = |_: usize, tokens: &[i64]| self.ends(tokens);
        let samples = policy.sample(requests, options, &mut ends)?;
        for (index, sample) in running.into_iter().zip(samples) {
            let row = &mut rows[index];
            let text = self.text(&sample)?;
            let start = row.response.len();
            row.take(&sample.tokens, &sample.logprobs, &sample.sampler_logprobs);
            let turn = row.episode.respond(&text)?;
            let reward = turn.reward - turn.penalty;
            if let Some(bytes) = &turn.reasoning {
                let (first, last) = self.tokens_of(&sample.tokens, bytes)?;
                if last > first {
                    row.reasoning.push((start + first, start + last));
                }
            }
            // A turn's reward is earned by its last token.
            if let Some(last) = row.token_rewards.last_mut() {
                *last = reward;
            }
            if row.episode.end().is_none() {
                let message = self.encode(&self.sampling.turn_format, &row.episode.message())?;
                let tokens = row.prompt.len() + row.response.len() + message.len();
                match self.bound_without_room(tokens) {
                    None => row.read(&message),
                    Some(_) => row.truncated = true,
                }
            }
        }
        Ok(true)
    }

    /// The bound on what the policy can read, if a response after so many tokens might pass it.
    fn bound_without_room(&self, tokens: usize) -> Option<usize> {
        let needed = tokens.saturating_add(self.sampling.max_tokens);
        self.sampling.context_length.filter(|length| needed > *length)
    }

    fn ends(&self, tokens: &[i64]) -> bool {
        self.stop_texts.iter().any(|stop| {
            let tail = tokens.len().saturating_sub(stop.len() + STOP_MARGIN);
            self.tokenizer.decode(&tokens[tail..]).is_ok_and(|text| text.contains(stop.as_str()))
        })
    }

    /// What the environment reads of a response, up to the first stop. The stop may be the tag that closes
    /// the answer; only where the whole response is the answer is it no part of it.
    fn text(&self, sample: &Sample) -> Result<String> {
        let drops_stop = self.rules.tags == Tags::None;
        let drops_token = drops_stop && sample.stop == StopReason::Token;
        let kept = sample.tokens.len() - usize::from(drops_token);
        let mut text = self.decode(&sample.tokens[..kept])?;
        let ends = self.stop_texts.iter().filter_map(|stop| {
            let start = text.find(stop.as_str())?;
            Some(if drops_stop { start } else { start + stop.len() })
        });
        if let Some(end) = ends.min() {
            text.truncate(end);
        }
        Ok(text)
    }

    /// The tokens that lie within some bytes of a response's text.
    fn tokens_of(&self, tokens: &[i64], bytes: &Range<usize>) -> Result<(usize, usize)> {
        // The least number of tokens whose text is long enough.
        let least = |is_enough: &dyn Fn(usize) -> bool| -> Result<usize> {
            let (mut low, mut high) = (0, tokens.len());
            while low < high {
                let middle = low + (high - low) / 2;
                if is_enough(self.decode(&tokens[..middle])?.len()) {
                    high = middle;
                } else {
                    low = middle + 1;
                }
            }
            Ok(low)
        };
        let first = least(&|length| length >= bytes.start)?;
        let beyond = least(&|length| length > bytes.end)?;
        Ok((first, beyond.saturating_sub(1)))
    }

    /// Whether tokens hold a message, but for spaces and capitals, which some tokenizers do not keep.
    fn gives_back(&self, tokens: &[i64], message: &str) -> Result<bool> {
        let bare = |text: &str| -> String {
            text.chars().filter(|it| !it.is_whitespace()).flat_map(char::to_lowercase).collect()
        };
        Ok(bare(&self.decode(tokens)?).contains(&bare(message)))
    }

    fn encode(&self, format: &str, message: &str) -> Result<Vec<i64>> {
        self.tokenizer.encode(&format.replacen("{}", message, 1)).map_err(|it| self.refuse(it))
    }

    fn decode(&self, tokens: &[i64]) -> Result<String> {
        self.tokenizer.decode(tokens).map_err(|problem| self.refuse(problem))
    }

    fn refuse(&self, problem: impl Into<String>) -> Error {
        Error::Environment { name: self.environment.name().into(), problem: problem.into() }
    }
}

impl Source for TextSource {
    fn sample(&mut self, policy: &Policy, request: &SourceRequest) -> Result<Vec<SampledGroup>> {
        if self.sampling.cache && !policy.has_cache() && !self.told_cache {
            self.told_cache = true;
            self.warnings.push(
                "the policy has no method forward_cached: every token is sampled by a forward pass over all before it".into(),
            );
        }
        let options = SamplingOptions {
            temperature: self.temperature,
            greedy: request.greedy,
            top_k: self.sampling.top_k,
            top_p: self.sampling.top_p,
            max_tokens: self.sampling.max_tokens,
            stop_tokens: self.stop_tokens.clone(),
            token_budget: self.sampling.token_budget,
            use_cache: self.sampling.cache,
        };
        let mut rows = self.rows(request)?;
        while self.turn(policy, &options, &mut rows)? {}
        let mut rows = rows.into_iter();
        let mut group = |visit: &Visit| -> Result<SampledGroup> {
            let (mut trajectories, mut outcomes) = (Vec::new(), Vec::new());
            for row in rows.by_ref().take(request.group_size) {
                let text = (self.decode(&row.prompt)?, self.decode(&row.response)?);
                let (trajectory, outcome) = row.finish(self.overlong);
                trajectories.push(trajectory);
                outcomes.push(Outcome { text: Some(text), ..outcome });
            }
            // The run's seed is in the upper half of a task, and that of the step in the visit's.
            let id = format!("{}-{}", visit.task as u32, visit.visit as u32);
            for (index, trajectory) in trajectories.iter_mut().enumerate() {
                trajectory.line = index + 1;
                trajectory.id = Some(format!("{id}/{index}"));
            }
            Ok(SampledGroup { group: Group { id, trajectories }, outcomes })
        };
        request.visits.iter().map(&mut group).collect()
    }

    fn warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }
}

/// A trajectory in the making.
struct Row {
    episode: Episode,
    seed: Seed,
    prompt: Vec<i64>,
    response: Vec<i64>,
    mask: Vec<bool>,
    logprobs: Vec<f64>,
    sampler_logprobs: Vec<f64>,
    token_rewards: Vec<f64>,
    reasoning: Vec<(usize, usize)>,
    truncated: bool,
}

impl Row {
    fn new(episode: Episode, seed: Seed, prompt: Vec<i64>) -> Self {
        Self {
            episode,
            seed,
            prompt,
            response: Vec::new(),
            mask: Vec::new(),
            logprobs: Vec::new(),
            sampler_logprobs: Vec::new(),
            token_rewards: Vec::new(),
            reasoning: Vec::new(),
            truncated: false,
        }
    }

    fn is_running(&self) -> bool {
        self.episode.end().is_none() && !self.truncated
    }

    fn tokens(&self) -> Vec<i64> {
        [self.prompt.as_slice(), &self.response].concat()
    }

    /// A stream for every turn: how many numbers a turn takes does not matter to the next.
    fn generator(&self) -> rand_chacha::ChaCha8Rng {
        let mut generator = self.seed.sampling_generator();
        generator.set_stream(self.episode.turns().len() as u64);
        generator
    }

    fn take(&mut self, tokens: &[i64], logprobs: &[f64], sampler_logprobs: &[f64]) {
        self.response.extend(tokens);
        self.logprobs.extend(logprobs);
        self.sampler_logprobs.extend(sampler_logprobs);
        self.mask.resize(self.response.len(), true);
        self.token_rewards.resize(self.response.len(), 0.0);
    }

    fn read(&mut self, message: &[i64]) {
        self.response.extend(message);
        let length = self.response.len();
        self.mask.resize(length, false);
        for numbers in [&mut self.logprobs, &mut self.sampler_logprobs, &mut self.token_rewards] {
            numbers.resize(length, 0.0);
        }
    }

    fn finish(mut self, overlong: Option<OverlongPenalty>) -> (Trajectory, Outcome) {
        let sampled = self.mask.iter().filter(|sampled| **sampled).count();
        let penalty = overlong.map_or(0.0, |overlong| {
            overlong.penalty(&Tensor::from(sampled as f64)).double_value(&[])
        });
        if let Some(last) = self.token_rewards.last_mut() {
            *last += penalty;
        }
        let outcome = Outcome {
            success: Some(self.episode.success()),
            turns: self.episode.turns().len(),
            invalid_actions: self.episode.invalid_actions(),
            malformed: self.episode.malformed(),
            truncated: self.truncated,
            overlong_penalty: 0.0 - penalty,
            text: None,
        };
        let trajectory = Trajectory {
            line: 0,
            id: None,
            content: Content::Tokens { prompt_ids: self.prompt, response_ids: self.response },
            mask: self.mask,
            reward: self.token_rewards.iter().sum(),
            token_rewards: Some(self.token_rewards),
            old_logprobs: Some(self.logprobs),
            ref_logprobs: None,
            sampler_logprobs: Some(self.sampler_logprobs),
            values: None,
            reasoning: (!self.reasoning.is_empty()).then_some(self.reasoning),
        };
        (trajectory, outcome)
    }
}
