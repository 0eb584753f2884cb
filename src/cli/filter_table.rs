//! What a filter kept, and why, on the terminal.

use std::fmt::Write;

use comfy_table::{CellAlignment, Table};
use gradprism::config::FilterConfig;
use gradprism::filter::{LossScale, Reason, Score, Strategy};
use gradprism::log::number;
use gradprism::sift::{SiftGroup, SiftReport, SiftStep};

use super::table::{MOST_GROUPS, bare};

/// Every step: its groups by rank, then what they add up to.
pub fn sift(report: &SiftReport, filter: &FilterConfig) -> String {
    let mut text = String::new();
    for step in &report.steps {
        if report.steps.len() > 1 {
            // Writing to a string cannot fail, here and below.
            let _ = writeln!(text, "\nstep {}", step.step);
        }
        let _ = writeln!(text, "{}", groups(step, filter));
        if step.groups.len() > MOST_GROUPS {
            let more = step.groups.len() - MOST_GROUPS;
            let _ = writeln!(text, "… and {more} more groups in groups.jsonl");
        }
        text.push_str(&totals(step, filter));
    }
    text
}

fn groups(step: &SiftStep, filter: &FilterConfig) -> Table {
    // The reward variance stands beside any other score.
    let is_other = filter.score != Score::RewardVariance;
    let mut header = vec!["rank", "group", "G", "reward"];
    header.extend(is_other.then_some("RV"));
    header.extend([filter.score.name(), "mass so far", "kept", "why"]);
    let last = header.len() - 1;
    let mut table = bare(header);
    for (index, column) in table.column_iter_mut().enumerate() {
        if index != 1 && index != last {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let mut order: Vec<&SiftGroup> = step.groups.iter().collect();
    // Those without a rank come last, in file order.
    order.sort_by_key(|group| group.verdict.rank.unwrap_or(usize::MAX));
    for group in order.into_iter().take(MOST_GROUPS) {
        let verdict = &group.verdict;
        let mut row = vec![
            verdict.rank.map_or("-".into(), |rank| rank.to_string()),
            group.group_id.clone(),
            group.group_size.to_string(),
            number(group.scores.reward_mean),
        ];
        row.extend(is_other.then(|| number(group.scores.reward_variance)));
        row.extend([
            verdict.score.map_or("-".into(), number),
            verdict.held_share.map_or("-".into(), |share| format!("{share:.3}")),
            if verdict.kept { "yes" } else { "no" }.into(),
            why(verdict.reason, filter).into(),
        ]);
        table.add_row(row);
    }
    table
}

fn why(reason: Reason, filter: &FilterConfig) -> &'static str {
    match (reason, filter.strategy) {
        (Reason::Chosen, Strategy::TopP) => "within the mass",
        (Reason::Chosen, Strategy::TopK | Strategy::TopKAbs) => "among the first",
        (Reason::Chosen, Strategy::MinP | Strategy::Threshold) => "within the limit",
        (Reason::Chosen, Strategy::None) => "every group",
        (Reason::KeepAll, _) => "none was chosen",
        (Reason::Zero, _) => "its score is 0",
        (Reason::Undefined, _) => "it has no score",
        (Reason::BeyondCut, _) => "beyond the cut",
    }
}

fn totals(step: &SiftStep, filter: &FilterConfig) -> String {
    let (kept, reasons) = (&step.kept, &step.reasons);
    let mut text = String::new();
    let _ = writeln!(
        text,
        "{} of {} groups kept ({} of {} trajectories) by {}; the last of them has {}",
        kept.groups,
        step.group_count,
        step.kept_trajectories,
        step.trajectories,
        filter.score.name(),
        kept.cut.map_or("none".into(), number),
    );
    let _ = writeln!(
        text,
        "left out: {} with a score of 0, {} without a score, {} beyond the cut",
        reasons.zero, reasons.undefined, reasons.beyond_cut
    );
    let spread = |spread: Option<f64>| spread.map_or("undefined".into(), number);
    let _ = write!(text, "Std(RV)/Mean(RV) {}", spread(kept.reward_variance_spread));
    if let Some(rate) = kept.keep_rate {
        let averaged = spread(kept.adaptive_spread);
        let _ = write!(text, ", averaged {averaged}: keep rate {}", number(rate));
    }
    let size = match filter.mini_batch_size {
        Some(size) => format!("{size} groups each"),
        None => "the whole batch".into(),
    };
    let _ = write!(
        text,
        "; optimiser steps left: {} of {} ({size})",
        kept.optimizer_steps, kept.optimizer_steps_unfiltered,
    );
    if filter.loss_scale != LossScale::None {
        let _ = write!(text, "; the loss is to be multiplied by {}", number(kept.loss_factor));
    }
    text.push('\n');
    text
}
