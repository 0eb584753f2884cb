//! What past diagnoses found, in a file that survives a restart. Averages, baseline and alarm are
//! computed from it anew each time, so that there is one truth, and a step that is measured again takes
//! its own place.

use std::io::Write;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::alarm::Cusum;
use super::metrics::{Marginal, Metrics, z_score};
use super::regime::{Baseline, Regime};
use super::sampling::Sampling;
use crate::error::{Error, Result};

/// The decay of the running means, as in RAGEN.
const EMA_DECAY: f64 = 0.9;
/// Of the file.
const FORMAT: u32 = 1;

/// The steps of a run, ascending.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct History {
    format: u32,
    /// The marginal of its numbers.
    pub marginal: Marginal,
    /// Which spans they are of.
    pub sampling: Sampling,
    /// The steps.
    pub entries: Vec<Entry>,
}

/// A step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// The step.
    pub step: i64,
    /// The share of trajectories with a span to measure.
    pub valid_share: f64,
    /// What was measured; none where too few spans were valid, or there was but one context.
    pub measured: Option<Measured>,
}

/// The numbers of a step that later steps need.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// I(X; Z) per token.
    pub mi_estimate: f64,
    /// H(Z | X) per token.
    pub conditional_entropy_est: f64,
    /// The spread of the marginals per token.
    pub marginal_std: f64,
    /// I(X; Z) of a sequence.
    pub mi_seq_estimate: f64,
    /// The spread of the mixtures.
    pub marginal_std_seq: f64,
}

impl From<&Metrics> for Measured {
    fn from(metrics: &Metrics) -> Self {
        Self {
            mi_estimate: metrics.token.mi_estimate,
            conditional_entropy_est: metrics.conditional_entropy_est,
            marginal_std: metrics.token.marginal_std,
            mi_seq_estimate: metrics.mi_seq_estimate,
            marginal_std_seq: metrics.marginal_std_seq,
        }
    }
}

/// Running means of the spreads, and I(X; Z) in units of them; under RAGEN's names.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ema {
    /// Of `marginal_std`.
    pub marginal_std_ema: f64,
    /// `mi_estimate / (marginal_std_ema + 10⁻³)`.
    pub mi_zscore_ema: f64,
    /// Of `marginal_std_seq`.
    pub marginal_std_ema_seq: f64,
    /// `mi_seq_estimate / (marginal_std_ema_seq + 10⁻³)`.
    pub mi_zscore_ema_seq: f64,
}

/// What the past says of the last step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Judgement {
    /// Running means; none where nothing was measured.
    #[serde(flatten)]
    pub ema: Option<Ema>,
    /// What it is compared with; none before there are enough steps.
    pub baseline: Option<Baseline>,
    /// H(Z | X) as a share of the baseline's.
    pub entropy_share: Option<f64>,
    /// I(X; Z) as a share of the baseline's.
    pub mi_share: Option<f64>,
    /// The regime; none without a baseline.
    pub regime: Option<Regime>,
    /// I(X; Z) in standard deviations above the baseline.
    pub standardised_mi: Option<f64>,
    /// The sum of the one-sided CUSUM; none before there is a baseline of two steps.
    pub cusum: Option<f64>,
    /// Whether it is above its threshold.
    pub alarm: bool,
}

/// How the past is read.
#[derive(Clone, Copy, Debug)]
pub struct JudgeOptions {
    /// A baseline of another run; none: the first steps of this one.
    pub baseline: Option<Baseline>,
    /// How many steps are the baseline.
    pub baseline_steps: usize,
    /// Below this share of the baseline H(Z | X) or I(X; Z) is low.
    pub low: f64,
    /// Below this share of valid trajectories it is format collapse.
    pub min_valid: f64,
}

impl History {
    /// No steps yet.
    pub fn new(marginal: Marginal, sampling: Sampling) -> Self {
        Self { format: FORMAT, marginal, sampling, entries: Vec::new() }
    }

    /// Reads a file; `key` names the setting it is for in messages.
    ///
    /// # Errors
    /// If it cannot be read, is no such file, or holds numbers of another marginal or sampling.
    pub fn load(path: &Path, key: &str, marginal: Marginal, sampling: Sampling) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
        let refuse = |problem: String| Error::config(key, format!("{}: {problem}", path.display()));
        let history: Self = serde_json::from_str(&text)
            .map_err(|error| refuse(format!("expected a state.json of gradprism: {error}")))?;
        if history.format != FORMAT {
            return Err(refuse(format!("expected format {FORMAT}, found {}", history.format)));
        }
        if (history.marginal, history.sampling) != (marginal, sampling) {
            return Err(refuse(format!(
                "expected numbers of marginal {marginal:?} and sampling {sampling:?} as configured, found {:?} and {:?}; name another file",
                history.marginal, history.sampling
            )));
        }
        if !history.entries.is_sorted_by(|left, right| left.step < right.step) {
            return Err(refuse("expected ascending steps".into()));
        }
        Ok(history)
    }

    /// Puts the file in place in one move: a reader sees the old one or the new one.
    ///
    /// # Errors
    /// If it cannot be written; the old file is then untouched.
    pub fn save(&self, path: &Path) -> Result<()> {
        let mut name = path.file_name().unwrap_or_default().to_os_string();
        name.push(format!(".{}.partial", std::process::id()));
        let beside = path.with_file_name(name);
        let write = || -> std::io::Result<()> {
            let mut file = std::fs::File::create(&beside)?;
            serde_json::to_writer_pretty(&mut file, self)?;
            file.write_all(b"\n")?;
            file.sync_all()?;
            std::fs::rename(&beside, path)
        };
        write().map_err(|error| {
            let _ = std::fs::remove_file(&beside);
            Error::io("write", path)(error)
        })
    }

    /// The last step.
    pub fn last_step(&self) -> Option<i64> {
        self.entries.last().map(|entry| entry.step)
    }

    /// How many steps it holds from one on.
    pub fn held_from(&self, step: i64) -> usize {
        self.entries.iter().filter(|entry| entry.step >= step).count()
    }

    /// Adds a step. What stood there at this step or after is replaced, as where training was resumed
    /// from an earlier checkpoint.
    pub fn push(&mut self, entry: Entry) {
        self.entries.retain(|earlier| earlier.step < entry.step);
        self.entries.push(entry);
    }

    /// What was measured, in order.
    pub fn measured(&self) -> impl Iterator<Item = &Measured> {
        self.entries.iter().filter_map(|entry| entry.measured.as_ref())
    }

    /// The baseline of the first measured steps, `steps` of them; none before there are as many.
    pub fn baseline(&self, steps: usize) -> Option<Baseline> {
        let first: Vec<Measured> = self.measured().take(steps).copied().collect();
        Baseline::of(&first).filter(|_| first.len() == steps)
    }

    /// What the whole of it says of its last step.
    pub fn judge(&self, options: &JudgeOptions) -> Judgement {
        let Some(last) = self.entries.last() else { return Judgement::default() };
        let own = self.baseline(options.baseline_steps);
        let baseline = options.baseline.or(own);
        // The steps that make the baseline are not held against it.
        let skipped = if options.baseline.is_some() { 0 } else { options.baseline_steps };
        let mut judgement = Judgement { baseline, ..Judgement::default() };
        if let Some(baseline) = &baseline {
            let mut cusum = Cusum::default();
            let later = self.measured().skip(skipped);
            later
                .filter_map(|step| baseline.standardised(step.mi_estimate))
                .for_each(|standardised| cusum.push(standardised));
            judgement.cusum = baseline.mi_std.map(|_| cusum.sum);
            judgement.alarm = cusum.is_alarm();
        }
        let Some(measured) = &last.measured else {
            judgement.regime =
                (last.valid_share < options.min_valid).then_some(Regime::FormatCollapse);
            return judgement;
        };
        judgement.ema = Some(self.ema(measured));
        if let Some((baseline, (entropy, mi))) =
            baseline.and_then(|baseline| Some((baseline, baseline.shares(measured)?)))
        {
            judgement.entropy_share = Some(entropy);
            judgement.mi_share = Some(mi);
            judgement.regime = Some(Regime::of(entropy >= options.low, mi >= options.low));
            judgement.standardised_mi = baseline.standardised(measured.mi_estimate);
        }
        judgement
    }

    fn ema(&self, last: &Measured) -> Ema {
        let of = |spread: fn(&Measured) -> f64| ema(self.measured().map(spread)).unwrap_or(0.0);
        let marginal_std_ema = of(|step| step.marginal_std);
        let marginal_std_ema_seq = of(|step| step.marginal_std_seq);
        Ema {
            marginal_std_ema,
            mi_zscore_ema: z_score(last.mi_estimate, marginal_std_ema),
            marginal_std_ema_seq,
            mi_zscore_ema_seq: z_score(last.mi_seq_estimate, marginal_std_ema_seq),
        }
    }
}

/// The running mean: the first value, then `0.9·mean + 0.1·value` (RAGEN). None of nothing.
pub fn ema(values: impl Iterator<Item = f64>) -> Option<f64> {
    values.reduce(|mean, value| EMA_DECAY * mean + (1.0 - EMA_DECAY) * value)
}
