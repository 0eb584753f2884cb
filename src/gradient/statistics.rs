//! Small statistics over the groups of a batch.

/// The mean; none of nothing.
pub fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// The value at share `q` of the sorted values, between neighbours by linear interpolation.
fn quantile(sorted: &[f64], q: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    let at = q * last as f64;
    let (below, above) = (at.floor() as usize, (at.ceil() as usize).min(last));
    Some(sorted[below] + (sorted[above] - sorted[below]) * (at - below as f64))
}

/// The median; none of nothing.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    quantile(&sorted, 0.5)
}

/// Spearman's rank correlation, ties at their mean rank; none for fewer than three pairs, or where
/// one side is constant.
pub fn spearman(left: &[f64], right: &[f64]) -> Option<f64> {
    if left.len() != right.len() || left.len() < 3 {
        return None;
    }
    let (left, right) = (ranks(left), ranks(right));
    let middle = (left.len() as f64 - 1.0) / 2.0;
    let sum = |a: &[f64], b: &[f64]| -> f64 {
        a.iter().zip(b).map(|(a, b)| (a - middle) * (b - middle)).sum()
    };
    let scale = (sum(&left, &left) * sum(&right, &right)).sqrt();
    (scale > 0.0).then(|| (sum(&left, &right) / scale).clamp(-1.0, 1.0))
}

/// Ranks from 0; equal values share the mean of their ranks.
fn ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*a].total_cmp(&values[*b]));
    let mut ranks = vec![0.0; values.len()];
    let mut start = 0;
    for run in order.chunk_by(|a, b| values[*a] == values[*b]) {
        let rank = start as f64 + (run.len() as f64 - 1.0) / 2.0;
        run.iter().for_each(|index| ranks[*index] = rank);
        start += run.len();
    }
    ranks
}

/// How groups are put into buckets of reward variance.
#[derive(Clone, Debug, PartialEq)]
pub enum Buckets {
    /// This many buckets of about equal size; equal values share a bucket.
    Quantiles(usize),
    /// Ascending edges; a value on an edge belongs to the bucket below it.
    Edges(Vec<f64>),
}

impl Buckets {
    /// The bucket of each value, from 0.
    pub fn assign(&self, values: &[f64]) -> Vec<usize> {
        let edges = match self {
            Self::Edges(edges) => edges.clone(),
            Self::Quantiles(count) => {
                let mut sorted = values.to_vec();
                sorted.sort_by(f64::total_cmp);
                (1..*count).filter_map(|k| quantile(&sorted, k as f64 / *count as f64)).collect()
            }
        };
        values.iter().map(|value| edges.iter().filter(|edge| *value > **edge).count()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spearman_by_hand() {
        // Ranks 0 1 2 3 against 1 0 3 2: 1 − 6·4/(4·15) = 0.6.
        assert_eq!(spearman(&[1.0, 2.0, 3.0, 4.0], &[2.0, 1.0, 9.0, 5.0]), Some(0.6));
        // With ties: ranks (0.5, 0.5, 2) against (0, 1, 2): 1.5/√(1.5·2).
        let tied = spearman(&[1.0, 1.0, 3.0], &[1.0, 2.0, 3.0]).unwrap();
        assert!((tied - 1.5 / 3_f64.sqrt()).abs() < 1e-15, "{tied}");
        assert_eq!(spearman(&[1.0, 1.0, 1.0], &[1.0, 2.0, 3.0]), None);
    }

    #[test]
    fn equal_values_share_a_bucket() {
        let values = [0.0, 0.0, 0.0, 0.0, 0.3, 0.1];
        // Sorted 0 0 0 0 .1 .3: the median is 0, the upper tercile lies a third of the way to .1.
        assert_eq!(Buckets::Quantiles(2).assign(&values), [0, 0, 0, 0, 1, 1]);
        assert_eq!(Buckets::Quantiles(3).assign(&values), [0, 0, 0, 0, 2, 2]);
        assert_eq!(Buckets::Edges(vec![0.1, 0.2]).assign(&values), [0, 0, 0, 0, 2, 0]);
        assert_eq!(median(&values), Some(0.0));
    }
}
