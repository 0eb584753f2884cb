//! The choices of RAGEN's rollout filter (commit 20daedc), odd ones too. What is odd:
//!
//! * Scores are cast to float32 first.
//! * `top_p` with a value of 1 or more keeps every group that is not left out for being 0.
//! * By linear mass it goes down the order until the mass is reached, and gives up at a score of at
//!   most 0: then, and where the target `value·Σ − epsilon` is at most 0, nothing is kept. Going up
//!   from the lowest, one score of 0 that may be kept is thus the end of it.
//! * By softmax mass it keeps the first group that reaches the value, and those before it, in float32.
//! * `min_p` from the lowest keeps what is at most `lowest/(value + 1e-10) + 1e-10`.
//! * `top_k` rounds down what float64 makes of `value·P`: 0.29 of 100 groups are 28.
//!
//! Where scores are equal RAGEN's choice is its sort's; here it goes by the order of the groups. RAGEN
//! knows no NaN; here it is never kept.

use tch::{Kind, Tensor};

use super::rank::Ranking;
use super::{Direction, Filter, Mass, Strategy};
use crate::error::{Error, Result};
use crate::objective::precise;

/// What RAGEN adds so that nothing is divided by 0.
const EPSILON: f64 = 1e-10;

/// `[P]` bool: which groups RAGEN keeps, for scores `[P]`.
pub(super) fn mask(filter: &Filter, scores: &Tensor) -> Result<Tensor> {
    let scores = scores.to_kind(Kind::Float);
    let eligible = filter.eligible(&scores);
    let keys = filter.keys(&scores, &eligible);
    let groups = scores.size()[0];
    let kept = match filter.strategy {
        Strategy::None => eligible.shallow_clone(),
        Strategy::TopP if filter.value >= 1.0 => eligible.shallow_clone(),
        Strategy::TopP => {
            let ranking = Ranking::new(&keys, &eligible)?;
            let count = match filter.mass {
                Mass::Linear => by_linear_mass(filter, &scores, &eligible, &ranking),
                Mass::Softmax => by_softmax_mass(filter, &ranking),
            };
            ranking.first(&count)?
        }
        Strategy::TopK => {
            let count = (filter.value * groups as f64) as i64;
            Ranking::new(&keys, &eligible)?.first_number(count.max(1))?
        }
        Strategy::TopKAbs => Ranking::new(&keys, &eligible)?.first_number(filter.value as i64)?,
        Strategy::MinP => match filter.direction {
            Direction::Highest => scores.ge_tensor(&(keys.amax(0, true) * filter.value)),
            Direction::Lowest => {
                scores.le_tensor(&(-keys.amax(0, true) / (filter.value + EPSILON) + EPSILON))
            }
        },
        Strategy::Threshold => {
            return Err(Error::config(
                "filter.compat",
                "RAGEN has no strategy threshold whose choices could be reproduced",
            ));
        }
    };
    Ok(kept.bitwise_and_tensor(&eligible))
}

/// How many `[1]` are kept.
fn by_linear_mass(
    filter: &Filter,
    scores: &Tensor,
    eligible: &Tensor,
    ranking: &Ranking,
) -> Tensor {
    let precise = precise(scores.device());
    let total = scores.masked_fill(&eligible.bitwise_not(), 0.0).sum(Kind::Float).to_kind(precise);
    let target = total * filter.value - filter.epsilon;
    let keys = ranking.sorted_precise();
    let is_group = keys.gt(f64::NEG_INFINITY);
    let sorted = match filter.direction {
        Direction::Highest => keys,
        Direction::Lowest => -keys,
    };
    let without_mass = sorted.le(0.0).bitwise_or_tensor(&is_group.bitwise_not());
    let before_the_end = without_mass.cumsum(0, Kind::Int64).eq(0);
    let held = sorted.masked_fill(&before_the_end.bitwise_not(), 0.0).cumsum(0, None);
    let short = held.lt_tensor(&target).bitwise_and_tensor(&before_the_end).sum(Kind::Int64);
    let reached = held.narrow(0, -1, 1).ge_tensor(&target).bitwise_and_tensor(&target.gt(0.0));
    (short + 1) * reached.to_kind(Kind::Int64)
}

/// How many `[1]` are kept.
fn by_softmax_mass(filter: &Filter, ranking: &Ranking) -> Tensor {
    let held = ranking.sorted().softmax(-1, Kind::Float).cumsum(0, None);
    held.lt(filter.value).sum_dim_intlist(0, true, Kind::Int64) + 1
}
