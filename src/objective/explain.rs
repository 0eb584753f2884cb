//! A loss in words and formulas.

use std::fmt;

use super::{
    AdvantageEstimator, Aggregation, Algorithm, GRPO_EPSILON, ImportanceLevel, KlEstimator,
    KlGradient, KlPlacement, SurrogateForm,
};

/// The loss with its numbers put in, term by term; `R` rewards, `A` advantages, `r` the ratio to the
/// policy that sampled, `m` the mask of sampled tokens.
impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        writeln!(f, "advantage    {}", self.advantage_formula())?;
        writeln!(f, "ratio        {}", self.ratio_formula())?;
        writeln!(f, "task         {}", self.task_formula())?;
        writeln!(f, "KL           {}", self.kl_formula())?;
        if self.entropy_coef == 0.0 {
            writeln!(f, "entropy      not in the loss (coefficient 0)")?;
        } else {
            writeln!(f, "entropy      −{} · H, over the whole vocabulary", self.entropy_coef)?;
        }
        write!(f, "aggregation  {}", self.aggregation_formula())
    }
}

impl Algorithm {
    fn advantage_formula(&self) -> String {
        match self.advantage {
            AdvantageEstimator::Grpo => format!(
                "A = (R − mean)/(std + {GRPO_EPSILON:e}) within the group, unbiased std; 0 where rewards are equal"
            ),
            AdvantageEstimator::DrGrpo => "A = R − mean within the group".into(),
            AdvantageEstimator::Rloo => "A = R − mean of the group's other rewards".into(),
            AdvantageEstimator::ReinforcePlusPlus => format!(
                "A = Σ γ^k r_(t+k) over sampled tokens, γ = {}, whitened over the batch",
                self.gamma
            ),
            AdvantageEstimator::Gae => format!(
                "A = Σ (γλ)^k δ_(t+k), δ = r + γV' − V over sampled tokens, γ = {}, λ = {}, whitened over the batch",
                self.gamma, self.lam
            ),
        }
    }

    fn ratio_formula(&self) -> String {
        let log_ratio = match self.surrogate.form {
            SurrogateForm::Gspo => "mean over the row of logp − old_logp",
            _ => "logp − old_logp",
        };
        match (self.surrogate.log_ratio_clamp, self.surrogate.form) {
            (None, _) => format!("r = exp({log_ratio})"),
            (Some(limit), SurrogateForm::Gspo) => format!("r = exp(min({log_ratio}, {limit}))"),
            (Some(limit), _) => format!("r = exp({log_ratio}, clamped to ±{limit})"),
        }
    }

    fn task_formula(&self) -> String {
        let surrogate = &self.surrogate;
        let clip = format!(
            "clip(r, {}, {})",
            round(1.0 - surrogate.clip_low),
            round(1.0 + surrogate.clip_high)
        );
        let mut formula = match surrogate.form {
            SurrogateForm::Cispo => format!("−A·{clip}·logp, the weight a constant"),
            _ => format!("max(−A·r, −A·{clip})"),
        };
        if let (Some(dual_clip), true) =
            (surrogate.dual_clip, surrogate.form != SurrogateForm::Cispo)
        {
            formula.push_str(&format!(", where A < 0 at most −A·{dual_clip}"));
        }
        if let Some(importance) = self.importance {
            let level = match importance.level {
                ImportanceLevel::Token => "token",
                ImportanceLevel::Sequence => "sequence",
            };
            formula.push_str(&format!(
                "; times min(π_old/π_sampler, {}) of the {level}",
                importance.cap
            ));
        }
        formula
    }

    fn kl_formula(&self) -> String {
        if self.kl.coef == 0.0 {
            return "not in the loss (coefficient 0)".into();
        }
        let estimate = match self.kl.estimator {
            KlEstimator::K1 => "k1 = x",
            KlEstimator::K2 => "k2 = x²/2",
            KlEstimator::K3 => "k3 = e^(−x) + x − 1",
            KlEstimator::Abs => "|x|",
        };
        let mut formula = match self.kl_placement {
            KlPlacement::Loss => format!("+{} · {estimate}", self.kl.coef),
            KlPlacement::Reward => {
                format!("−{} · ({estimate}) on the reward of each token", self.kl.coef)
            }
        };
        formula.push_str(", x = logp − ref_logp");
        if let Some(limit) = self.kl.log_ratio_clamp {
            formula.push_str(&format!(" clamped to ±{limit}"));
        }
        if let Some(limit) = self.kl.value_clamp {
            formula.push_str(&format!(", the value clamped to ±{limit}"));
        }
        if (self.kl_placement, self.kl.gradient) == (KlPlacement::Loss, KlGradient::K2) {
            formula.push_str(", with the gradient of k2");
        }
        formula
    }

    fn aggregation_formula(&self) -> String {
        match self.aggregation {
            Aggregation::TokenMean => "Σ L·m / Σ m over the whole batch".into(),
            Aggregation::SeqMeanTokenMean => "mean over rows of (Σ_t L·m / Σ_t m)".into(),
            Aggregation::SeqMeanTokenSum => "mean over rows of Σ_t L·m".into(),
            Aggregation::SeqMeanTokenSumNorm => format!(
                "mean over rows of Σ_t L·m / {}",
                self.norm_length.map_or("norm_length".into(), |length| length.to_string())
            ),
        }
    }
}

/// 1 + 0.28 without the rounding of binary fractions.
fn round(value: f64) -> f64 {
    (value * 1e9).round() / 1e9
}
