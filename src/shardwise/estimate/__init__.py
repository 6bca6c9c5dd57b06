"""What a layout costs, computed without torch: bytes a rank holds, stages that cost alike."""
