//! Where a policy stands in the plane of H(Z | X) and I(X; Z), against a baseline.

use serde::Serialize;

use super::history::Measured;
use crate::filter::variance;
use crate::gradient::mean;

/// A quadrant of the plane (RAGEN-2, arXiv 2604.06268), or outside of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Regime {
    /// Entropy and mutual information high.
    Diverse,
    /// Entropy high, mutual information low: the reasoning varies, and not with the input.
    TemplateCollapse,
    /// Entropy low, mutual information high: a sure policy that reads its input.
    Compressed,
    /// Both low.
    LowEntropyCollapse,
    /// Too few trajectories have a span to measure; those that have one are no sample of the policy.
    FormatCollapse,
}

impl Regime {
    /// From whether either is high.
    pub fn of(entropy_high: bool, mi_high: bool) -> Self {
        match (entropy_high, mi_high) {
            (true, true) => Self::Diverse,
            (true, false) => Self::TemplateCollapse,
            (false, true) => Self::Compressed,
            (false, false) => Self::LowEntropyCollapse,
        }
    }

    /// Its name for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Diverse => "diverse",
            Self::TemplateCollapse => "template collapse",
            Self::Compressed => "compressed",
            Self::LowEntropyCollapse => "low-entropy collapse",
            Self::FormatCollapse => "format collapse",
        }
    }
}

/// What healthy steps look like.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Baseline {
    /// How many steps it is the mean of.
    pub steps: usize,
    /// Their mean H(Z | X) per token.
    pub conditional_entropy_est: f64,
    /// Their mean I(X; Z) per token.
    pub mi_estimate: f64,
    /// The unbiased standard deviation of I(X; Z) over them; none of one step.
    pub mi_std: Option<f64>,
}

impl Baseline {
    /// Of measured steps; none of no steps.
    pub fn of(steps: &[Measured]) -> Option<Self> {
        let of = |value: fn(&Measured) -> f64| steps.iter().map(value).collect::<Vec<f64>>();
        let values = of(|step| step.mi_estimate);
        Some(Self {
            steps: steps.len(),
            conditional_entropy_est: mean(&of(|step| step.conditional_entropy_est))?,
            mi_estimate: mean(&values)?,
            mi_std: (steps.len() > 1).then(|| variance(values).sqrt()),
        })
    }

    /// H(Z | X) and I(X; Z) of a step as shares of the baseline's; none where that is not above 0.
    pub fn shares(&self, step: &Measured) -> Option<(f64, f64)> {
        (self.conditional_entropy_est > 0.0 && self.mi_estimate > 0.0).then(|| {
            (
                step.conditional_entropy_est / self.conditional_entropy_est,
                step.mi_estimate / self.mi_estimate,
            )
        })
    }

    /// By how many standard deviations of a new step's I(X; Z) it lies above the baseline:
    /// `(x − mean) / (s·√(1 + 1/m))`. None for a baseline of one step, or of equal ones.
    pub fn standardised(&self, mi_estimate: f64) -> Option<f64> {
        let spread = self.mi_std? * (1.0 + 1.0 / self.steps as f64).sqrt();
        (spread > 0.0).then(|| (mi_estimate - self.mi_estimate) / spread)
    }
}
