//! A study as tables on the terminal.

use std::fmt::Write;

use comfy_table::{Cell, CellAlignment, Color, ContentArrangement, Table, TableComponent, presets};
use gradprism::log::{number, with_error};
use gradprism::study::{BatchRecord, GroupRecord, SIGNIFICANT, StudyReport};

/// Groups that a table shows at most.
pub const MOST_GROUPS: usize = 40;

/// Every step: its groups by descending SNR, then the batch.
pub fn study(report: &StudyReport) -> String {
    let mut text = String::new();
    for step in &report.steps {
        if report.steps.len() > 1 {
            // Writing to a string cannot fail, here and below.
            let _ = writeln!(text, "\nstep {}", step.step);
        }
        let _ = writeln!(text, "{}", groups(step));
        if step.groups.len() > MOST_GROUPS {
            let _ = writeln!(
                text,
                "… and {} more groups in prompts.jsonl",
                step.groups.len() - MOST_GROUPS
            );
        }
        text.push_str(&batch(step));
    }
    text
}

/// A table with lines above and below alone, as wide as its cells.
pub fn bare<T: Into<Cell>>(header: impl IntoIterator<Item = T>) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_HORIZONTAL_ONLY);
    for between_rows in [TableComponent::HorizontalLines, TableComponent::MiddleIntersections] {
        table.remove_style(between_rows);
    }
    table.set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header.into_iter().map(Into::into).collect::<Vec<Cell>>());
    table
}

fn groups(step: &BatchRecord) -> Table {
    let mut table = bare([
        "group",
        "G",
        "reward",
        "RV",
        "|task|",
        "signal²",
        "p",
        "noise²",
        "SNR",
        "|reg|",
        "reg share",
        "kept",
    ]);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let mut order: Vec<&GroupRecord> = step.groups.iter().collect();
    order.sort_by(|a, b| b.split.snr.total_cmp(&a.split.snr));
    for group in order.into_iter().take(MOST_GROUPS) {
        let split = &group.split;
        let significant = split.signal_p.is_some_and(|p| p <= SIGNIFICANT);
        let p = Cell::new(split.signal_p.map_or("-".into(), |p| format!("{p:.3}")));
        let share = Cell::new(split.dominance.map_or("-".into(), |share| format!("{share:.3}")));
        table.add_row([
            Cell::new(&group.group_id),
            Cell::new(group.group_size),
            Cell::new(number(group.reward_mean)),
            Cell::new(number(group.reward_variance)),
            Cell::new(number(split.task_norm)),
            Cell::new(with_error(split.signal_sq, split.signal_sq_se)),
            if significant { p.fg(Color::Green) } else { p },
            Cell::new(with_error(split.noise_sq, split.noise_sq_se)),
            Cell::new(with_error(split.snr, split.snr_se)),
            Cell::new(number(split.reg_norm)),
            if split.dominance > Some(0.5) { share.fg(Color::Red) } else { share },
            Cell::new(if group.kept { "yes" } else { "no" }),
        ]);
    }
    table
}

fn batch(step: &BatchRecord) -> String {
    let mut text = String::new();
    let significant = (step.significant_share * step.group_count as f64).round();
    let _ = writeln!(
        text,
        "{} groups, {} trajectories, {} sampled tokens; reward {}",
        step.group_count,
        step.trajectories,
        step.tokens,
        number(step.reward_mean)
    );
    let _ = writeln!(
        text,
        "signal at p <= {SIGNIFICANT} in {significant} of {}; equal rewards in {}; the filter keeps {}",
        step.group_count,
        (step.all_equal_share * step.group_count as f64).round(),
        step.kept.groups
    );
    if let (Some(norms), Some(signal)) = (&step.grad_norm, &step.signal) {
        let _ = writeln!(
            text,
            "batch gradient: |task| {}, |reg| {}, signal² {}, noise² {}, SNR {}",
            number(norms.task),
            number(norms.reg),
            number(signal.signal_sq),
            number(signal.noise_sq),
            number(signal.snr)
        );
    }
    let correlation = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.2}"));
    let _ = writeln!(
        text,
        "Spearman of reward variance with SNR {}, with signal² {}; mean cosine between prompts: task {}, reg {}",
        correlation(step.spearman_rv_snr),
        correlation(step.spearman_rv_signal),
        correlation(step.task_coherence),
        correlation(step.reg_coherence)
    );
    text
}
