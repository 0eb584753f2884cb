//! The reasoning spans of a batch, and how many are missing.

use serde::Serialize;

use super::sampling::Sampling;
use crate::rollout::{Batch, Content, Trajectory};

/// A span that can be scored: it holds a token that the policy sampled.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    /// Its group.
    pub group_id: &'a str,
    /// Its trajectory.
    pub trajectory: &'a Trajectory,
    /// Where it begins in the response.
    pub start: usize,
    /// Where it ends.
    pub end: usize,
}

impl<'a> Span<'a> {
    /// Everything before it: the prompt, and the response up to it.
    pub fn context(&self) -> Vec<i64> {
        let prompt = match &self.trajectory.content {
            Content::Tokens { prompt_ids, .. } => prompt_ids.as_slice(),
            Content::Steps { .. } => &[],
        };
        [prompt, &self.trajectory.content.actions()[..self.start]].concat()
    }

    /// Its tokens, and which of them the policy sampled, up to the last sampled one: what follows is
    /// never predicted.
    pub fn tokens(&self) -> (&'a [i64], &'a [bool]) {
        let mask = &self.trajectory.mask[self.start..self.end];
        let length = mask.iter().rposition(|sampled| *sampled).map_or(0, |last| last + 1);
        let tokens = &self.trajectory.content.actions()[self.start..self.start + length];
        (tokens, &mask[..length])
    }

    /// The sampled tokens in it.
    pub fn sampled(&self) -> usize {
        self.tokens().1.iter().filter(|sampled| **sampled).count()
    }
}

/// How many trajectories have a span to score. Format collapse shows here, and nowhere else: metrics
/// are of the survivors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct SpanCounts {
    /// Trajectories of the batch.
    pub trajectories: usize,
    /// Trajectories without any span.
    pub without_span: usize,
    /// Spans without a sampled token, of those that could have been drawn.
    pub empty_spans: usize,
    /// Spans that can be drawn.
    pub valid_spans: usize,
    /// Trajectories that have one.
    pub valid_trajectories: usize,
}

impl SpanCounts {
    /// The share of trajectories with a span that can be drawn.
    pub fn valid_share(&self) -> f64 {
        self.valid_trajectories as f64 / self.trajectories.max(1) as f64
    }
}

/// The spans that each trajectory of a batch offers. Where no line of the file names `reasoning`
/// (`named` is false), the whole response is the span; where lines do, one that does not has none.
pub fn offered(batch: &Batch, sampling: Sampling, named: bool) -> (Vec<Vec<Span<'_>>>, SpanCounts) {
    let mut counts = SpanCounts::default();
    let mut offers = Vec::new();
    for group in &batch.groups {
        for trajectory in &group.trajectories {
            let whole = [(0, trajectory.content.len())];
            let listed: &[(usize, usize)] = match &trajectory.reasoning {
                Some(listed) => listed,
                None if named => &[],
                None => &whole,
            };
            let candidates = match sampling {
                Sampling::FirstTurn => &listed[..listed.len().min(1)],
                Sampling::Trajectory => listed,
            };
            let offer: Vec<Span> = candidates
                .iter()
                .map(|(start, end)| Span {
                    group_id: &group.id,
                    trajectory,
                    start: *start,
                    end: *end,
                })
                .filter(|span| span.sampled() > 0)
                .collect();
            counts.trajectories += 1;
            counts.without_span += usize::from(listed.is_empty());
            counts.empty_spans += candidates.len() - offer.len();
            counts.valid_spans += offer.len();
            counts.valid_trajectories += usize::from(!offer.is_empty());
            offers.push(offer);
        }
    }
    (offers, counts)
}
