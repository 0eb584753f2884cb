//! The section of sampling.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::NoneWord;
use super::resolve::range;
use crate::error::{Error, Result};
use crate::objective::{OverlongPenalty, Preset};

/// Section `sampling`. The temperature is `policy.temperature`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingConfig {
    /// The `tokenizer.json` of the policy.
    pub tokenizer: Option<PathBuf>,
    /// The first message of a trajectory takes the place of `{}`.
    pub prompt_format: String,
    /// Each later message takes the place of `{}`.
    pub turn_format: String,
    /// Only the most likely tokens, this many, are drawn from.
    pub top_k: Option<usize>,
    /// Only the most likely tokens that together hold this share are drawn from.
    pub top_p: f64,
    /// Tokens of a response at most.
    pub max_tokens: usize,
    /// Texts that end a response; one that is a single token is looked for among the tokens.
    pub stop: Vec<String>,
    /// Tokens that the policy can read; a trajectory ends before it would pass them. None: no bound.
    pub context_length: Option<usize>,
    /// Padded tokens of one forward pass.
    pub token_budget: usize,
    /// Whether the policy's `forward_cached` is used, if it has one.
    pub cache: bool,
    /// Samples groups again whose rewards are all equal, or `none`.
    pub dynamic: Option<MaybeDynamic>,
    /// A penalty for trajectories of many sampled tokens, or `none`.
    pub overlong: Option<MaybeOverlong>,
}

impl Default for SamplingConfig {
    fn default() -> Self {
        Self {
            tokenizer: None,
            prompt_format: "{}".into(),
            turn_format: "{}".into(),
            top_k: None,
            top_p: 1.0,
            max_tokens: 64,
            stop: Vec::new(),
            context_length: None,
            token_budget: 8192,
            cache: true,
            dynamic: None,
            overlong: None,
        }
    }
}

/// Dynamic sampling, or the word `none`, which overrides a preset's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected none, or rounds and on_limit")]
pub enum MaybeDynamic {
    /// With these bounds.
    Some(DynamicSampling),
    /// None.
    None(NoneWord),
}

/// DAPO's dynamic sampling (arXiv 2503.14476, Section 3.2): groups whose rewards are all equal are left
/// out, and others are sampled in their place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DynamicSampling {
    /// How often a step samples at most.
    pub rounds: u64,
    /// What to do with a step that is short of groups then.
    pub on_limit: OnLimit,
}

impl Default for DynamicSampling {
    fn default() -> Self {
        Self { rounds: 10, on_limit: OnLimit::default() }
    }
}

/// What to do with a step that is short of groups after the last round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnLimit {
    /// Train on the groups that there are.
    #[default]
    Train,
    /// Make no update, and leave the groups to the next step.
    Skip,
    /// End the run.
    Stop,
}

/// An overlong penalty, or the word `none`, which overrides a preset's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected none, or limit, buffer and factor")]
pub enum MaybeOverlong {
    /// With these numbers.
    Some(OverlongConfig),
    /// None.
    None(NoneWord),
}

/// The numbers of [`OverlongPenalty`], over the sampled tokens of a trajectory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OverlongConfig {
    /// The generation limit in tokens.
    pub limit: f64,
    /// The width of the slope in tokens.
    pub buffer: f64,
    /// The depth.
    #[serde(default = "one")]
    pub factor: f64,
}

fn one() -> f64 {
    1.0
}

impl SamplingConfig {
    /// The bounds of dynamic sampling, if it is on.
    pub fn dynamic_sampling(&self) -> Option<DynamicSampling> {
        match self.dynamic {
            Some(MaybeDynamic::Some(dynamic)) => Some(dynamic),
            _ => None,
        }
    }

    /// The penalty for long responses, if there is one.
    pub fn overlong_penalty(&self) -> Option<OverlongPenalty> {
        match self.overlong {
            Some(MaybeOverlong::Some(OverlongConfig { limit, buffer, factor })) => {
                Some(OverlongPenalty { limit, buffer, factor })
            }
            _ => None,
        }
    }

    /// What the preset decides: DAPO samples dynamically, and penalises long responses where a trajectory
    /// is one response.
    pub(super) fn fill(&mut self, preset: Preset, turns: usize) {
        let is_dapo = preset == Preset::Dapo;
        self.dynamic.get_or_insert(if is_dapo {
            MaybeDynamic::Some(DynamicSampling::default())
        } else {
            MaybeDynamic::None(NoneWord::None)
        });
        // The paper's buffer is a fifth of its limit: 4,096 of 20,480 tokens.
        let (limit, buffer) = (self.max_tokens as f64, (self.max_tokens / 5) as f64);
        self.overlong.get_or_insert(if is_dapo && turns == 1 && buffer > 0.0 {
            MaybeOverlong::Some(OverlongConfig { limit, buffer, factor: 1.0 })
        } else {
            MaybeOverlong::None(NoneWord::None)
        });
    }

    pub(super) fn check(&self) -> Result<()> {
        for (key, format) in
            [("prompt_format", &self.prompt_format), ("turn_format", &self.turn_format)]
        {
            if format.matches("{}").count() != 1 {
                return Err(Error::config(
                    format!("sampling.{key}"),
                    format!("expected a text with one {{}} in it, found `{format}`"),
                ));
            }
        }
        if self.dynamic_sampling().is_some_and(|dynamic| dynamic.rounds == 0) {
            return Err(Error::config("sampling.dynamic.rounds", "expected at least 1, found 0"));
        }
        range("sampling.top_p", self.top_p, f64::MIN_POSITIVE, 1.0)?;
        if self.stop.iter().any(String::is_empty) {
            return Err(Error::config("sampling.stop", "expected texts, found an empty one"));
        }
        if let Some(OverlongPenalty { limit, buffer, factor }) = self.overlong_penalty() {
            range("sampling.overlong.limit", limit, 1.0, 1e9)?;
            range("sampling.overlong.buffer", buffer, f64::MIN_POSITIVE, limit)?;
            range("sampling.overlong.factor", factor, 0.0, 1e6)?;
        }
        Ok(())
    }
}
