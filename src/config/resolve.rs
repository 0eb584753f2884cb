//! From what a file says to what is run: checks, presets, and the options of each stage.

use std::path::PathBuf;

use serde::Serialize;
use tch::Device;

use super::*;
use crate::gradient::Buckets;
use crate::objective::{Aggregation, Algorithm, KlPenalty, Surrogate};
use crate::policy::{Inputs, Output, PolicyOptions};
use crate::rollout::ReadOptions;

impl Config {
    /// Checks every number, and fills in what the preset decides.
    ///
    /// # Errors
    /// At the first field that is missing or out of range.
    pub fn resolve(mut self) -> Result<Self> {
        let algorithm = self.algorithm()?;
        self.filter.check()?;
        let temperature = self.policy.temperature;
        if !(temperature > 0.0 && temperature.is_finite()) {
            return Err(Error::config(
                "policy.temperature",
                format!("expected a number above 0, found {temperature}"),
            ));
        }
        self.trainable()?;
        if let BucketsConfig::Edges(edges) = &self.decomposition.buckets
            && !edges.is_sorted_by(|low, high| low < high)
        {
            return Err(Error::config(
                "decomposition.buckets",
                format!("expected a number of buckets or ascending edges, found {edges:?}"),
            ));
        }
        if let BucketsConfig::Count(count) = self.decomposition.buckets
            && count > 1000
        {
            return Err(Error::config(
                "decomposition.buckets",
                format!("expected at most 1000 buckets, found {count}"),
            ));
        }
        self.diagnostics.check()?;
        if self.decomposition.debias {
            check_debias(&algorithm)?;
        }
        let sketch = self.decomposition.engine == EngineName::Sketch;
        if sketch && !(2..=4096).contains(&self.decomposition.sketch_dimensions) {
            return Err(Error::config(
                "decomposition.sketch_dimensions",
                format!("expected 2 to 4096, found {}", self.decomposition.sketch_dimensions),
            ));
        }
        if sketch && self.decomposition.bound {
            return Err(Error::config(
                "decomposition.bound",
                "expected an exact engine, found engine: sketch; the bound takes the scores of single rows",
            ));
        }
        if let Threads::Count(count) = self.threads
            && !(1..=1024).contains(&count)
        {
            return Err(Error::config(
                "threads",
                format!("expected auto or 1 to 1024, found {count}"),
            ));
        }
        self.algorithm = self.algorithm.filled(&algorithm);
        Ok(self)
    }

    /// The loss: the preset with its overrides.
    ///
    /// # Errors
    /// If a number is out of range, or one that the preset needs is missing.
    pub fn algorithm(&self) -> Result<Algorithm> {
        let section = &self.algorithm;
        let preset = section.preset.algorithm();
        let algorithm = Algorithm {
            advantage: section.advantage.unwrap_or(preset.advantage),
            surrogate: Surrogate {
                form: section.surrogate.unwrap_or(preset.surrogate.form),
                clip_low: section.clip_low.unwrap_or(preset.surrogate.clip_low),
                clip_high: section.clip_high.unwrap_or(preset.surrogate.clip_high),
                dual_clip: number_or(section.dual_clip, preset.surrogate.dual_clip),
                log_ratio_clamp: number_or(
                    section.log_ratio_clamp,
                    preset.surrogate.log_ratio_clamp,
                ),
            },
            aggregation: section.aggregation.unwrap_or(preset.aggregation),
            norm_length: section.norm_length.or(preset.norm_length),
            gamma: section.gamma.unwrap_or(preset.gamma),
            lam: section.lam.unwrap_or(preset.lam),
            kl: KlPenalty {
                coef: section.kl.coef.unwrap_or(preset.kl.coef),
                estimator: section.kl.estimator.unwrap_or(preset.kl.estimator),
                gradient: section.kl.gradient.unwrap_or(preset.kl.gradient),
                log_ratio_clamp: number_or(section.kl.log_ratio_clamp, preset.kl.log_ratio_clamp),
                value_clamp: number_or(section.kl.value_clamp, preset.kl.value_clamp),
            },
            kl_placement: section.kl.placement.unwrap_or(preset.kl_placement),
            entropy_coef: section.entropy_coef.unwrap_or(preset.entropy_coef),
            importance: section.importance.or(preset.importance),
        };
        range("algorithm.clip_low", algorithm.surrogate.clip_low, 0.0, 1.0)?;
        range("algorithm.clip_high", algorithm.surrogate.clip_high, 0.0, 1e6)?;
        if let Some(dual_clip) = algorithm.surrogate.dual_clip {
            range("algorithm.dual_clip", dual_clip, 1.0, 1e6)?;
        }
        for (key, clamp) in [
            ("algorithm.log_ratio_clamp", algorithm.surrogate.log_ratio_clamp),
            ("algorithm.kl.log_ratio_clamp", algorithm.kl.log_ratio_clamp),
            ("algorithm.kl.value_clamp", algorithm.kl.value_clamp),
        ] {
            range(key, clamp.unwrap_or(1.0), f64::MIN_POSITIVE, 1e6)?;
        }
        if let Some(importance) = algorithm.importance {
            range("algorithm.importance.cap", importance.cap, f64::MIN_POSITIVE, 1e6)?;
        }
        range("algorithm.gamma", algorithm.gamma, 0.0, 1.0)?;
        range("algorithm.lam", algorithm.lam, 0.0, 1.0)?;
        range("algorithm.kl.coef", algorithm.kl.coef, 0.0, 1e6)?;
        range("algorithm.entropy_coef", algorithm.entropy_coef, 0.0, 1e6)?;
        if let Some(length) = algorithm.norm_length {
            range("algorithm.norm_length", length, f64::MIN_POSITIVE, 1e9)?;
        }
        if algorithm.aggregation == Aggregation::SeqMeanTokenSumNorm {
            match algorithm.norm_length {
                Some(length) if length > 0.0 && length.is_finite() => {}
                found => {
                    let found = found.map_or("none".into(), |length| length.to_string());
                    return Err(Error::config(
                        "algorithm.norm_length",
                        format!(
                            "expected the generation limit in tokens, which seq_mean_token_sum_norm divides by, found {found}"
                        ),
                    ));
                }
            }
        }
        Ok(algorithm)
    }

    fn trainable(&self) -> Result<regex::Regex> {
        regex::Regex::new(&self.policy.trainable).map_err(|error| {
            // The last line says what is wrong; those before it draw the place.
            let error = error.to_string();
            let reason = error.lines().last().unwrap_or_default().trim_start_matches("error: ");
            Error::config(
                "policy.trainable",
                format!(
                    "expected a regular expression, found `{}`: {reason}",
                    self.policy.trainable
                ),
            )
        })
    }

    /// The buckets of reward variance; none if there is at most one.
    pub fn buckets(&self) -> Option<Buckets> {
        match &self.decomposition.buckets {
            BucketsConfig::Count(0 | 1) => None,
            BucketsConfig::Count(count) => Some(Buckets::Quantiles(*count)),
            BucketsConfig::Edges(edges) => Some(Buckets::Edges(edges.clone())),
        }
    }

    /// The rollout file.
    ///
    /// # Errors
    /// If none is named.
    pub fn rollouts_path(&self) -> Result<PathBuf> {
        self.rollouts.path.clone().ok_or_else(|| {
            Error::config(
                "rollouts.path",
                "expected a rollout file, found none; name it in the file or with --set rollouts.path=PATH",
            )
        })
    }

    /// How the rollouts are read.
    pub fn read_options(&self) -> ReadOptions {
        ReadOptions {
            kind: self.policy.kind,
            tokenizer: self.rollouts.tokenizer.clone(),
            single: self.rollouts.single,
            missing_reward: self.rollouts.missing_reward,
        }
    }

    /// How the policy is loaded onto a device.
    ///
    /// # Errors
    /// If `policy.trainable` is no regular expression.
    pub fn policy_options(&self, device: Device) -> Result<PolicyOptions> {
        let policy = &self.policy;
        Ok(PolicyOptions {
            kind: policy.kind,
            inputs: match &policy.inputs {
                InputsName::Auto(_) => Inputs::Auto,
                InputsName::Order(roles) => Inputs::Order(roles.clone()),
            },
            output: match &policy.output {
                OutputName::Index(index) => Output::Named(index.to_string()),
                OutputName::Name(name) if name == "auto" => Output::Auto,
                OutputName::Name(name) => Output::Named(name.clone()),
            },
            trainable: self.trainable()?,
            dtype: policy.dtype,
            observation_dtype: policy.observation_dtype,
            observation_shape: None,
            optimize_graph: policy.optimize_graph,
            device,
        })
    }

    /// The checkpoint of every step, for the steps of the rollouts; rollouts without steps are
    /// studied under each checkpoint of a list.
    ///
    /// # Errors
    /// If no checkpoint is named, or their number does not fit the steps.
    pub fn checkpoints(&self, steps: &[Option<i64>]) -> Result<Vec<PathBuf>> {
        let key = "policy.checkpoint";
        match &self.policy.checkpoint {
            None => Err(Error::config(
                key,
                "expected a TorchScript file, found none; name it in the file or with --set policy.checkpoint=PATH",
            )),
            Some(Checkpoints::One(path)) => {
                let text = path.to_string_lossy();
                if !text.contains("{step}") {
                    return Ok(vec![path.clone(); steps.len()]);
                }
                steps
                    .iter()
                    .map(|step| {
                        let step = step.ok_or_else(|| {
                            Error::config(key, "has {step} in it, and the rollouts name no steps")
                        })?;
                        Ok(PathBuf::from(text.replace("{step}", &step.to_string())))
                    })
                    .collect()
            }
            Some(Checkpoints::List(paths)) if paths.is_empty() => {
                Err(Error::config(key, "expected at least one file, found an empty list"))
            }
            Some(Checkpoints::List(paths)) => {
                if steps != [None] && paths.len() != steps.len() {
                    return Err(Error::config(
                        key,
                        format!(
                            "expected as many checkpoints as the rollouts have steps ({}), found {}",
                            steps.len(),
                            paths.len()
                        ),
                    ));
                }
                Ok(paths.clone())
            }
        }
    }
}

impl AlgorithmConfig {
    fn filled(&self, algorithm: &Algorithm) -> Self {
        Self {
            preset: self.preset,
            advantage: Some(algorithm.advantage),
            surrogate: Some(algorithm.surrogate.form),
            clip_low: Some(algorithm.surrogate.clip_low),
            clip_high: Some(algorithm.surrogate.clip_high),
            dual_clip: Some(algorithm.surrogate.dual_clip.into()),
            log_ratio_clamp: Some(algorithm.surrogate.log_ratio_clamp.into()),
            aggregation: Some(algorithm.aggregation),
            norm_length: algorithm.norm_length,
            gamma: Some(algorithm.gamma),
            lam: Some(algorithm.lam),
            kl: KlConfig {
                coef: Some(algorithm.kl.coef),
                estimator: Some(algorithm.kl.estimator),
                gradient: Some(algorithm.kl.gradient),
                placement: Some(algorithm.kl_placement),
                log_ratio_clamp: Some(algorithm.kl.log_ratio_clamp.into()),
                value_clamp: Some(algorithm.kl.value_clamp.into()),
            },
            entropy_coef: Some(algorithm.entropy_coef),
            importance: algorithm.importance,
        }
    }
}

pub(super) fn range(key: &str, value: f64, low: f64, high: f64) -> Result<()> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    let is_below_one = high == 1.0 - f64::EPSILON;
    let expected = match (low, high) {
        (f64::MIN, f64::MAX) => "a finite number".to_owned(),
        (f64::MIN_POSITIVE, f64::MAX) => "a finite number above 0".to_owned(),
        (low, f64::MAX) => format!("a finite number of at least {low}"),
        (f64::MIN_POSITIVE, high) => format!("a number above 0 and at most {high}"),
        (low, _) if is_below_one => format!("a number of at least {low} and below 1"),
        (low, high) => format!("a number from {low} to {high}"),
    };
    Err(Error::config(key, format!("expected {expected}, found {value}")))
}

fn check_debias(algorithm: &Algorithm) -> Result<()> {
    let sums = matches!(
        algorithm.aggregation,
        Aggregation::SeqMeanTokenSum | Aggregation::SeqMeanTokenSumNorm
    );
    if algorithm.importance.is_some() {
        return Err(Error::config(
            "decomposition.debias",
            "the bias is known at ratio 1 only; leave algorithm.importance out",
        ));
    }
    if algorithm.advantage.mean_baseline_factor(2).is_some() && sums {
        return Ok(());
    }
    Err(Error::config(
        "decomposition.debias",
        format!(
            "the bias is known for a mean baseline without a spread to divide by (advantage dr_grpo or rloo) and sums over tokens (seq_mean_token_sum, seq_mean_token_sum_norm); found {} and {}",
            word(&algorithm.advantage),
            word(&algorithm.aggregation)
        ),
    ))
}

/// A choice as it is written in a file.
pub(super) fn word(choice: &impl Serialize) -> String {
    serde_yaml::to_string(choice).map_or_else(|_| "?".into(), |word| word.trim().to_owned())
}
